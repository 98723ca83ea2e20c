//! Merges of attention states on a device, each one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::kernels::{Kernel, Kernels};
use super::rows::{VECTOR, moves_vectors};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::kernels::merge::{States, candidates, unsupported};
use crate::cuda::params::{Divisor, MergeStatesParams, Rows, State, address, count, lse_flag};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{Checked, MergeArgs, MergeStatesArgs};
use crate::tensor::Tensor;

/// The operators on one device.
#[derive(Debug)]
pub struct Merges {
    kernels: Kernels<DType, Pair>,
}

/// Both kernels of a type. Which of them a call takes is not the caller's concern, so that the first call
/// loads both, and any later one may be captured.
#[derive(Debug)]
struct Pair {
    two: Kernel,
    any: Kernel,
}

impl Merges {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> Merges {
        Merges {
            kernels: Kernels::new("merge", loader, context),
        }
    }

    /// Merges two attention states.
    pub fn merge(&self, args: &Checked<MergeArgs>, stream: Stream) -> Result<()> {
        let merge = Merge {
            first: state(&args.v_a.insert_dim(1), &args.s_a.insert_dim(1)),
            second: state(&args.v_b.insert_dim(1), &args.s_b.insert_dim(1)),
            num_states: 2,
            inputs: [args.v_a, args.v_b],
            v_out: args.v_out,
            s_out: args.s_out,
            mask: args.mask,
            flags: lse_flag(args.lse_base),
        };
        self.enqueue(&merge, stream)
    }

    /// Merges n attention states.
    pub fn merge_states(&self, args: &Checked<MergeStatesArgs>, stream: Stream) -> Result<()> {
        let (num_states, dtype) = (args.v.extent(1) as u32, args.v.dtype());
        let first = state(&args.v, &args.s);
        let merge = Merge {
            first,
            second: match num_states {
                2 => next_state(first, dtype),
                _ => State::default(),
            },
            num_states,
            inputs: [args.v, args.v],
            v_out: args.v_out,
            s_out: args.s_out,
            mask: None,
            flags: lse_flag(args.lse_base),
        };
        self.enqueue(&merge, stream)
    }

    fn enqueue(&self, merge: &Merge, stream: Stream) -> Result<()> {
        let dtype = merge.v_out.dtype();
        let params = merge.params();
        let rows = merge.v_out.extent(0) * merge.v_out.extent(1);
        let rows = count("v_out", "rows", rows)?;
        let current = self.kernels.enter(stream)?;
        let pair = self.kernels.get(&current, dtype, stream, |loader, cc| {
            let load = |states| {
                let found = loader.find(candidates(dtype, states, cc), || unsupported(dtype, cc));
                found.map(Kernel::new)
            };
            Ok(Pair {
                two: load(States::Two)?,
                any: load(States::Any)?,
            })
        })?;
        let kernel = match states(&params) {
            States::Two => &pair.two,
            States::Any => &pair.any,
        };
        let rows_of_block = kernel.threads() >> params.log2_lanes;
        let blocks = rows.div_ceil(rows_of_block);
        // SAFETY: both kernels take a `FolioMergeStatesParams`; the addresses are the caller's tensors,
        // whose extents `api` checked.
        unsafe { kernel.enqueue(&current, &params, blocks, stream) }
    }
}

/// `v` is `[token, state, head, dim]`, `s` `[token, state, head]`.
fn state(v: &Tensor, s: &Tensor) -> State {
    State {
        v: v.address() as u64,
        s: s.address() as u64,
        v_stride_token: v.stride(0),
        v_stride_state: v.stride(1),
        v_stride_head: v.stride(2),
        s_stride_token: s.stride(0),
        s_stride_state: s.stride(1),
        s_stride_head: s.stride(2),
    }
}

/// The state after `state` of a tensor with several.
fn next_state(state: State, dtype: DType) -> State {
    // Where there is no element a stride may be anything.
    let v_bytes = state.v_stride_state.wrapping_mul(dtype.size() as i64);
    let s_bytes = state.s_stride_state.wrapping_mul(size_of::<f32>() as i64);
    State {
        v: state.v.wrapping_add_signed(v_bytes),
        s: state.s.wrapping_add_signed(s_bytes),
        ..state
    }
}

/// The kernel of two states, where it can.
fn states(params: &MergeStatesParams) -> States {
    let rows_are_vectors = params.vectors != 0 && params.head_dim > 0;
    if params.num_states == 2 && rows_are_vectors && params.head_dim <= VECTOR << params.log2_lanes
    {
        States::Two
    } else {
        States::Any
    }
}

/// Either kind of merge.
struct Merge {
    first: State,
    second: State,
    num_states: u32,
    inputs: [Tensor; 2],
    v_out: Tensor,
    s_out: Option<Tensor>,
    mask: Option<Tensor>,
    flags: u32,
}

impl Merge {
    fn params(&self) -> MergeStatesParams {
        let head_dim = self.v_out.extent(2) as u32;
        let vectors = self.inputs.iter().chain([&self.v_out]).all(moves_vectors);
        let pieces = if vectors { head_dim / VECTOR } else { head_dim };
        MergeStatesParams {
            first: self.first,
            second: self.second,
            v_out: Rows::of(&self.v_out),
            s_out: address(self.s_out),
            s_out_stride_token: self.s_out.map_or(0, |s| s.stride(0)),
            s_out_stride_head: self.s_out.map_or(0, |s| s.stride(1)),
            mask: address(self.mask),
            mask_stride: self.mask.map_or(0, |mask| mask.stride(0)),
            num_tokens: self.v_out.extent(0),
            num_heads: Divisor::new(self.v_out.extent(1) as u32),
            num_states: self.num_states,
            head_dim,
            flags: self.flags,
            vectors: vectors.into(),
            log2_lanes: pieces.max(1).next_power_of_two().min(32).trailing_zeros(),
        }
    }
}
