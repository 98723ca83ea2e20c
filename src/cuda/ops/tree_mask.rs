//! Masks, positions and links of trees of draft tokens on a device, in one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::keyless_kernel::{KeylessKernel, Workers};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::kernels::keyless::TREE_MASK;
use crate::cuda::params::address;
use crate::cuda::tree_mask_params::{
    TreeMaskParams, WIDE_NEXT_SIBLING, WIDE_NEXT_TOKEN, WIDE_POSITIONS,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{Checked, TreeMaskArgs};
use crate::tensor::Tensor;

/// `TOKENS` of the kernel.
const TOKENS_OF_TILE: u64 = 32;

/// The operator on one device.
#[derive(Debug)]
pub struct TreeMask(KeylessKernel);

impl TreeMask {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> TreeMask {
        TreeMask(KeylessKernel::new("tree_mask", &TREE_MASK, loader, context))
    }

    /// Enqueues blocks for each tree.
    pub fn run(&self, args: &Checked<TreeMaskArgs>, stream: Stream) -> Result<()> {
        let params = params(args);
        let blocks = u64::from(params.batch_size) * u64::from(params.parts);
        let of = ("prefix_lens", Workers::Blocks(blocks));
        // SAFETY: the kernel takes a `FolioTreeMaskParams`; the addresses are the caller's tensors, whose extents `api`
        // checked, and the kernel keeps to them.
        unsafe { self.0.enqueue(&params, of, stream) }
    }
}

fn params(args: &TreeMaskArgs) -> TreeMaskParams {
    let room = |out: Option<Tensor>| out.map_or(0, |out| out.extent(0));
    let wide = [
        (args.positions, WIDE_POSITIONS),
        (args.next_token, WIDE_NEXT_TOKEN),
        (args.next_sibling, WIDE_NEXT_SIBLING),
    ];
    let is_wide = |out: Option<Tensor>| out.is_some_and(|out| out.dtype() == DType::I64);
    let wide = wide.into_iter().filter(|(out, _)| is_wide(*out));
    TreeMaskParams {
        parents: args.parents.address() as u64,
        prefix_lens: args.prefix_lens.address() as u64,
        qo_indptr: address(args.qo_indptr),
        mask_bytes: address(args.mask_bytes),
        mask_bits: address(args.mask_bits),
        tree_mask: address(args.tree_mask),
        tree_bits: address(args.tree_bits),
        positions: address(args.positions),
        next_token: address(args.next_token),
        next_sibling: address(args.next_sibling),
        bytes_room: room(args.mask_bytes),
        bits_room: room(args.mask_bits),
        tree_room: room(args.tree_mask),
        num_tokens: args.parents.extent(0) as u32,
        batch_size: args.prefix_lens.extent(0) as u32,
        tree_size: args.tree_size() as u32,
        row_bytes: args.tree_bits.map_or(0, |bits| bits.extent(1)) as u32,
        wide: wide.map(|(_, flag)| flag).sum(),
        parts: parts(args),
    }
}

/// Blocks of a tree: one for each tile where trees have one size, or on average, since sizes are the device's.
fn parts(args: &TreeMaskArgs) -> u32 {
    let trees = args.prefix_lens.extent(0).max(1) as u64;
    let tokens = (args.parents.extent(0) as u64).div_ceil(trees);
    tokens.div_ceil(TOKENS_OF_TILE) as u32
}
