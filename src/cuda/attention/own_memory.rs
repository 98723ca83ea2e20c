//! Where a handle has what is neither a plan's nor its planning kernel's in the workspace: memory of the kernels around a run's, and of
//! that run's kernel. Offsets alone.

use super::fold_scales::FoldScales;
use super::latent_queries::LatentQueries;
use super::mask_items::MaskItems;
use super::narrow::Narrow;
use super::round_lse::RoundLse;
use crate::cuda::plan::regions::PlanningRegions;
use crate::plan::{Capacity, PARTS_ALIGNMENT};
use crate::problem::AttentionDesc;

/// Offsets in what is the backend's own, in their order behind the planning kernel's records.
#[derive(Debug, Clone, Copy)]
pub struct OwnMemory {
    /// Of factors of k and v.
    pub scales: usize,
    /// Of copies of lengths.
    pub lengths: usize,
    /// Of an lse of fp32.
    pub lse: usize,
    /// Of a mask of items.
    pub items_mask: usize,
    /// Of rows of queries.
    pub latent_queries: usize,
    /// Of what the kernels ask for.
    pub scratch: usize,
}

impl OwnMemory {
    pub fn new(capacity: &Capacity, desc: &AttentionDesc) -> OwnMemory {
        let behind = |start: usize, bytes: usize| {
            let end = start.saturating_add(bytes);
            end.checked_next_multiple_of(PARTS_ALIGNMENT)
                .unwrap_or(usize::MAX)
        };
        let scales = PlanningRegions::at(0, capacity.counts.batch_size, desc).end;
        let lengths = behind(scales, FoldScales::bytes(desc));
        let lse = behind(lengths, Narrow::bytes(desc));
        let items_mask = behind(lse, RoundLse::bytes(desc));
        let latent_queries = behind(items_mask, MaskItems::bytes(desc));
        OwnMemory {
            scales,
            lengths,
            lse,
            items_mask,
            latent_queries,
            scratch: behind(latent_queries, LatentQueries::bytes(desc)),
        }
    }
}
