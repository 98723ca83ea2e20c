//! A plan in the caller's workspace as kernels see it: device addresses of its parts, and the records that the
//! planning kernel keeps for itself. Where the parts lie is decided in `src/plan`.

use crate::cuda::params::{PLAN_REQUEST_BYTES, PlanView};
use crate::plan::{Layout, PARTS_ALIGNMENT, Regions};

/// Offsets of what the planning kernel keeps between its steps, from the start of the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanningRegions {
    /// `[max_batch_size]` `FolioPlanRequest`.
    pub requests: usize,
    /// `[max_batch_size]` u32.
    pub first_item: usize,
    /// `[max_batch_size]` u32.
    pub first_combine: usize,
}

impl PlanningRegions {
    /// Bytes for so many requests.
    pub fn bytes(max_batch_size: usize) -> usize {
        let end = PlanningRegions::at(0, max_batch_size).first_combine;
        end.saturating_add(4 * max_batch_size)
    }

    /// Places the records from `start` on.
    pub fn at(start: usize, max_batch_size: usize) -> PlanningRegions {
        let after = |start: usize, bytes: usize| {
            start
                .saturating_add(bytes)
                .checked_next_multiple_of(PARTS_ALIGNMENT)
                .unwrap_or(usize::MAX)
        };
        let first_item = after(start, PLAN_REQUEST_BYTES * max_batch_size);
        PlanningRegions {
            requests: start,
            first_item,
            first_combine: after(first_item, 4 * max_batch_size),
        }
    }
}

/// Device addresses of a plan that lies at `base` by `layout`. `page_ids` are the caller's, where they are not
/// copied.
pub fn view(regions: &Regions, layout: &Layout, base: u64, page_ids: Option<u64>) -> PlanView {
    let at = |offset: usize| base + offset as u64;
    PlanView {
        qo_indptr: at(layout.qo_indptr),
        kv_len: at(layout.kv_len),
        page_ids: page_ids.unwrap_or(at(layout.page_ids)),
        items: at(layout.items),
        combines: at(layout.combines),
        partials: at(layout.partials),
        counts: at(layout.counts),
        next_tile: at(layout.next_tile),
        partial_o: at(regions.partial_o),
        partial_lse: at(regions.partial_lse),
    }
}
