//! Merges of attention states on a device, each one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::kernels::{Kernel, Kernels};
use super::rows::{VECTOR, moves_vectors};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::Context;
use crate::cuda::kernels::merge::{Form, States, candidates, unsupported};
use crate::cuda::merge_params::MergeGeneralParams;
use crate::cuda::params::{
    Divisor, MergeStatesParams, Rows, State, address, count, dtype_code, lse_flag,
};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{Checked, MergeArgs, MergeStatesArgs, MergeVarlenArgs};
use crate::tensor::Tensor;

/// The operators on one device.
#[derive(Debug)]
pub struct Merges {
    kernels: Kernels<DType, OfType>,
}

/// All kernels for states of a type. Which of them a call takes is not the caller's concern, so that the first call
/// loads all, and any later one may be captured.
#[derive(Debug)]
struct OfType {
    plain: Pair,
    general: Pair,
}

impl OfType {
    fn load(loader: &Loader, dtype: DType, cc: (u32, u32)) -> Result<OfType> {
        Ok(OfType {
            plain: Pair::load(loader, dtype, Form::Plain, cc)?,
            general: Pair::load(loader, dtype, Form::General, cc)?,
        })
    }
}

#[derive(Debug)]
struct Pair {
    two: Kernel,
    any: Kernel,
}

impl Pair {
    fn load(loader: &Loader, dtype: DType, form: Form, cc: (u32, u32)) -> Result<Pair> {
        let load = |states| {
            let found = candidates(dtype, (states, form), cc);
            let found = loader.find(found, || unsupported(dtype, cc));
            found.map(Kernel::new)
        };
        Ok(Pair {
            two: load(States::Two)?,
            any: load(States::Any)?,
        })
    }

    fn of(&self, states: States) -> &Kernel {
        match states {
            States::Two => &self.two,
            States::Any => &self.any,
        }
    }
}

impl Merges {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> Merges {
        Merges {
            kernels: Kernels::new("merge", loader, context),
        }
    }

    /// Loads what merges of states of this type need.
    pub fn prepare(&self, states: DType) -> Result<()> {
        let load = |loader: &Loader, cc| OfType::load(loader, states, cc);
        self.kernels.prepare(states, load)
    }

    /// Merges two attention states.
    pub fn merge(&self, args: &Checked<MergeArgs>, stream: Stream) -> Result<()> {
        let merge = Merge {
            first: state(&args.v_a.insert_dim(1), &args.s_a.insert_dim(1)),
            second: state(&args.v_b.insert_dim(1), &args.s_b.insert_dim(1)),
            num_states: 2,
            inputs: [args.v_a, args.v_b],
            s_dtype: args.s_a.dtype(),
            v_out: args.v_out,
            s_out: args.s_out,
            mask: args.mask,
            flags: lse_flag(args.lse_base),
            indptr: None,
            num_tokens_with_first: args.num_tokens_with_a(),
            o_scale: args.o_scale,
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
                2 => next_state(first, dtype, args.s.dtype()),
                _ => State::default(),
            },
            num_states,
            inputs: [args.v, args.v],
            s_dtype: args.s.dtype(),
            v_out: args.v_out,
            s_out: args.s_out,
            mask: None,
            flags: lse_flag(args.lse_base),
            indptr: None,
            num_tokens_with_first: args.v_out.extent(0),
            o_scale: args.o_scale,
        };
        self.enqueue(&merge, stream)
    }

    /// Merges as many attention states per token as it has.
    pub fn merge_varlen(&self, args: &Checked<MergeVarlenArgs>, stream: Stream) -> Result<()> {
        let merge = Merge {
            // All tokens share the states: the dimension of extent one has stride 0.
            first: state(&args.v.insert_dim(0), &args.s.insert_dim(0)),
            second: State::default(),
            num_states: args.v.extent(0) as u32,
            inputs: [args.v, args.v],
            s_dtype: args.s.dtype(),
            v_out: args.v_out,
            s_out: args.s_out,
            mask: None,
            flags: lse_flag(args.lse_base),
            indptr: Some(args.indptr),
            num_tokens_with_first: args.v_out.extent(0),
            o_scale: args.o_scale,
        };
        self.enqueue(&merge, stream)
    }

    fn enqueue(&self, merge: &Merge, stream: Stream) -> Result<()> {
        let rows = merge.v_out.extent(0) * merge.v_out.extent(1);
        let rows = count("v_out", "rows", rows)?;
        let current = self.kernels.enter(stream)?;
        let dtype = merge.dtype();
        let load = |loader: &Loader, cc| OfType::load(loader, dtype, cc);
        let of_type = self.kernels.get(&current, dtype, stream, load)?;
        let params = merge.params();
        let pair = match merge.form() {
            Form::Plain => &of_type.plain,
            Form::General => &of_type.general,
        };
        let kernel = pair.of(merge.states(&params.merge));
        let rows_of_block = kernel.threads() >> params.merge.log2_lanes;
        let blocks = rows.div_ceil(rows_of_block);
        // SAFETY: plain kernels take a `FolioMergeStatesParams`, general ones a `FolioMergeGeneralParams`; the addresses
        // are the caller's tensors, whose extents `api` checked. Kernels keep what they read of indptr within the states.
        unsafe {
            match merge.form() {
                Form::Plain => kernel.enqueue(&current, &params.merge, blocks, stream),
                Form::General => kernel.enqueue(&current, &params, blocks, stream),
            }
        }
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
fn next_state(state: State, dtype: DType, s_dtype: DType) -> State {
    // Where there is no element a stride may be anything.
    let v_bytes = state.v_stride_state.wrapping_mul(dtype.size() as i64);
    let s_bytes = state.s_stride_state.wrapping_mul(s_dtype.size() as i64);
    State {
        v: state.v.wrapping_add_signed(v_bytes),
        s: state.s.wrapping_add_signed(s_bytes),
        ..state
    }
}

/// Any kind of merge.
struct Merge {
    first: State,
    second: State,
    num_states: u32,
    inputs: [Tensor; 2],
    /// The type of the states' lse.
    s_dtype: DType,
    v_out: Tensor,
    s_out: Option<Tensor>,
    mask: Option<Tensor>,
    flags: u32,
    indptr: Option<Tensor>,
    num_tokens_with_first: i64,
    o_scale: f32,
}

impl Merge {
    /// The type of the states.
    fn dtype(&self) -> DType {
        self.inputs[0].dtype()
    }

    /// The types of the states' lse and of the merged one.
    fn s_dtypes(&self) -> [DType; 2] {
        let merged = self.s_out.map_or(DType::F32, |s| s.dtype());
        [self.s_dtype, merged]
    }

    fn form(&self) -> Form {
        let is_plain = self.indptr.is_none()
            && self.num_tokens_with_first == self.v_out.extent(0)
            && self.v_out.dtype() == self.dtype()
            && self.s_dtypes() == [DType::F32; 2];
        if is_plain { Form::Plain } else { Form::General }
    }

    /// The kernel of two states, where it can.
    fn states(&self, params: &MergeStatesParams) -> States {
        let are_two = self.num_states == 2 && self.indptr.is_none();
        let rows_are_vectors = params.vectors != 0 && params.head_dim > 0;
        if are_two && rows_are_vectors && params.head_dim <= VECTOR << params.log2_lanes {
            States::Two
        } else {
            States::Any
        }
    }

    /// Of a general kernel; a plain one takes the first field.
    fn params(&self) -> MergeGeneralParams {
        let [s_dtype, s_out_dtype] = self.s_dtypes();
        MergeGeneralParams {
            merge: self.plain_params(),
            indptr: address(self.indptr),
            num_tokens_with_first: self.num_tokens_with_first,
            o_factor: 1.0 / self.o_scale,
            o_dtype: dtype_code(self.v_out.dtype()),
            s_dtype: dtype_code(s_dtype),
            s_out_dtype: dtype_code(s_out_dtype),
        }
    }

    fn plain_params(&self) -> MergeStatesParams {
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
