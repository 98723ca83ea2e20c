//! A plan in the caller's workspace as kernels see it: device addresses of its parts, and the records that the
//! planning kernel keeps for itself. Where the parts lie is decided in `src/plan`.

use crate::cuda::cascade_params::{PLAN_SHARE_BYTES, SHARED_SEGMENTS};
use crate::cuda::params::PlanView;
use crate::cuda::plan_params::PLAN_REQUEST_BYTES;
use crate::plan::{Layout, PARTS_ALIGNMENT, Regions};
use crate::problem::AttentionDesc;

/// Offsets of what the planning kernel keeps between its steps, from the start of the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanningRegions {
    /// `[entries]` `FolioPlanRequest`: an entry for each request, and in a cascade for each segment.
    pub requests: usize,
    /// `[entries]` u32.
    pub first_item: usize,
    /// `[entries]` u32.
    pub first_combine: usize,
    /// `[entries]` `FolioPlanShare`; none outside of cascades.
    pub shares: usize,
    /// One past the last.
    pub end: usize,
}

impl PlanningRegions {
    /// Places the records from `start` on.
    pub fn at(start: usize, max_batch_size: usize, desc: &AttentionDesc) -> PlanningRegions {
        let (entries, share_bytes) = match desc.shared_levels {
            0 => (max_batch_size, 0),
            _ => (max_batch_size + SHARED_SEGMENTS, PLAN_SHARE_BYTES),
        };
        let after = |start: usize, bytes: usize| {
            start
                .saturating_add(bytes)
                .checked_next_multiple_of(PARTS_ALIGNMENT)
                .unwrap_or(usize::MAX)
        };
        let first_item = after(start, PLAN_REQUEST_BYTES * entries);
        let first_combine = after(first_item, 4 * entries);
        let shares = after(first_combine, 4 * entries);
        PlanningRegions {
            requests: start,
            first_item,
            first_combine,
            shares,
            end: after(shares, share_bytes * entries),
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
