//! What a plan leaves to the runs of a handle: where its parts are, and how large its batch is or may be. How it comes about is
//! `handle`'s matter.

use super::combine::SplitRows;
use super::kernel::Run;
use super::run_params::MaskStarts;
use crate::cuda::driver::blocks_of;
use crate::cuda::params::{AttentionParams, PlanView};
use crate::error::Result;
use crate::problem::{AttentionArgs, Checked, Earlier, Keys};

/// What `run` needs of the current plan.
#[derive(Debug, Clone, Copy)]
pub struct Planned {
    pub view: PlanView,
    pub mask_starts: MaskStarts,
    /// Where factors of k and v have room.
    pub scales: u64,
    /// Where an lse of fp32 has room.
    pub lse: u64,
    /// Where a mask of items has room.
    pub items_mask: u64,
    /// Where rows of queries in fp8 have room.
    pub latent_queries: u64,
    pub num_items: usize,
    pub split: SplitRows,
    /// Query rows of the largest item, or the most there can be.
    pub q_tile: u32,
    pub q_tile_is_exact: bool,
    pub has_few_keys: bool,
    /// Those of each request that the plan is over, at the numbers that they have among all.
    pub keys: Keys,
    /// The most there can be where only the device knows, and where it changes under a graph.
    pub num_keys: u64,
    /// The same of query rows and requests.
    pub num_rows: u64,
    pub num_requests: u32,
    /// Query rows of the batch, those of other plans of it included; or the most there can be.
    pub num_tokens: u64,
    /// Address of what kernels asked for.
    pub scratch: u64,
}

impl Planned {
    /// A run of the plan, whose new tokens are appended before it.
    pub fn run<'a>(
        &self,
        args: &'a Checked<AttentionArgs>,
        params: &'a AttentionParams,
        earlier: Earlier,
    ) -> Result<Run<'a>> {
        Ok(Run {
            args,
            params,
            num_items: blocks_of("qo_indptr and kv_len", self.num_items as u64)?,
            q_tile: self.q_tile,
            q_tile_is_exact: self.q_tile_is_exact,
            has_few_keys: self.has_few_keys,
            num_keys: self.num_keys,
            num_rows: self.num_rows,
            num_requests: self.num_requests,
            num_tokens: self.num_tokens,
            keys: self.keys,
            scratch: self.scratch,
            new_tokens: None,
            earlier,
        })
    }
}
