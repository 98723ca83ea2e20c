//! The operators around attention on a device: KV append and merges. Each is one launch.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::attention_kernel::blocks_of;
use super::context::{Context, Current};
use super::kernels::{self, Op, Query, Row, Types};
use super::launch::Launch;
use super::loader::Loader;
use super::module::Function;
use super::params::{
    AppendParams, AppendTensor, Cache, Divisor, MergeStatesParams, Rows, State, address, lse_flag,
    row_alignment, scales_stride,
};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{AppendArgs, Checked, MergeArgs, MergeStatesArgs};
use crate::tensor::Tensor;

/// Elements that a thread moves at once where rows are aligned.
const VECTOR: u32 = 8;

/// Kernels of the operators, each loaded at its first use.
#[derive(Debug, Default)]
pub struct Operators {
    loaded: Mutex<HashMap<(Op, Types), Kernel>>,
}

type Kernel = (&'static Row, Function);

impl Operators {
    /// Writes new tokens to a paged cache.
    pub fn append(
        &self,
        loader: &Loader,
        context: &Arc<Context>,
        args: &Checked<AppendArgs>,
        stream: Stream,
    ) -> Result<()> {
        let types = Types {
            q: args.key.dtype(),
            kv: args.k_cache.dtype(),
            o: args.key.dtype(),
        };
        let params = append_params(args);
        let blocks = blocks_of(params.num_tokens as u64)?;
        self.enqueue(
            loader,
            context,
            (Op::Append, types),
            &params,
            blocks,
            stream,
        )
    }

    /// Merges two attention states.
    pub fn merge(
        &self,
        loader: &Loader,
        context: &Arc<Context>,
        args: &Checked<MergeArgs>,
        stream: Stream,
    ) -> Result<()> {
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
        self.enqueue_merge(loader, context, &merge, stream)
    }

    /// Merges n attention states.
    pub fn merge_states(
        &self,
        loader: &Loader,
        context: &Arc<Context>,
        args: &Checked<MergeStatesArgs>,
        stream: Stream,
    ) -> Result<()> {
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
        self.enqueue_merge(loader, context, &merge, stream)
    }

    fn enqueue_merge(
        &self,
        loader: &Loader,
        context: &Arc<Context>,
        merge: &Merge,
        stream: Stream,
    ) -> Result<()> {
        let dtype = merge.v_out.dtype();
        let types = Types {
            q: dtype,
            kv: dtype,
            o: dtype,
        };
        let params = merge.params();
        let rows = blocks_of(merge.v_out.extent(0) as u64 * merge.v_out.extent(1) as u64)?;
        let op = merge_op(&params);
        let rows_of_block = kernel_threads(op, types) >> params.log2_lanes;
        let key = (op, types);
        let blocks = rows.div_ceil(rows_of_block);
        self.enqueue(loader, context, key, &params, blocks, stream)
    }

    fn enqueue<P: Copy>(
        &self,
        loader: &Loader,
        context: &Arc<Context>,
        key: (Op, Types),
        params: &P,
        blocks: u32,
        stream: Stream,
    ) -> Result<()> {
        let current = context.enter()?;
        current.check_stream(stream)?;
        let (row, function) = self.kernel(loader, &current, key, stream)?;
        let launch = Launch {
            grid: [blocks, 1, 1],
            threads: row.shape.threads,
            cluster: 1,
            dependent: false,
            stream,
        };
        // SAFETY: `P` is the parameter of the operator's kernel; the addresses are the caller's tensors,
        // whose extents `api` checked.
        unsafe { launch.enqueue(&current, &function, params, &[]) }
    }

    /// Loading a module is not possible while a stream is captured, so the first call may not be.
    fn kernel(
        &self,
        loader: &Loader,
        current: &Current<'_>,
        (op, types): (Op, Types),
        stream: Stream,
    ) -> Result<Kernel> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((row, function)) = loaded.get(&(op, types)) {
            return Ok((row, function.clone()));
        }
        if current.is_capturing(stream)? {
            return Err(Error::Capture(format!(
                "{}: its first call on a device loads code and is not accepted while the stream is captured; a call before the capture is",
                op.name()
            )));
        }
        let load = |op| loader.find(query(op, types, current), |_| true);
        // Which of the merges a call takes is not the caller's concern: the first loads both.
        if let Some(other) = other_merge(op) {
            loaded.insert((other, types), load(other)?);
        }
        let kernel = load(op)?;
        loaded.insert((op, types), kernel.clone());
        Ok(kernel)
    }
}

fn query(op: Op, types: Types, current: &Current<'_>) -> Query {
    Query {
        op,
        compute_capability: current.context().device().compute_capability,
        types,
        head_dim_qk: 0,
        head_dim_vo: 0,
    }
}

fn kernel_threads(op: Op, types: Types) -> u32 {
    let row = kernels::table()
        .iter()
        .find(|row| row.op == op && row.types == types);
    row.map_or(1, |row| row.shape.threads)
}

fn append_params(args: &Checked<AppendArgs>) -> AppendParams {
    let sides = [
        (&args.key, &args.k_cache, args.k_scale, args.k_scales),
        (&args.value, &args.v_cache, args.v_scale, args.v_scales),
    ];
    let vectors = sides
        .iter()
        .all(|&(source, cache, ..)| moves_vectors(source) && moves_vectors(cache));
    let [k, v] = sides.map(|(source, cache, scale, scales)| {
        let head_dim = source.extent(2) as u32;
        let pieces = if vectors { head_dim / VECTOR } else { head_dim };
        AppendTensor {
            source: Rows::of(source),
            cache: Cache::of(cache),
            scales: address(scales),
            scale,
            scales_stride: scales_stride(scales),
            head_dim,
            pieces: Divisor::new(pieces.max(1)),
        }
    });
    let page_size = args.k_cache.extent(1);
    AppendParams {
        k,
        v,
        slots: args.slot_mapping.address() as u64,
        num_tokens: args.slot_mapping.extent(0),
        num_slots: args.k_cache.extent(0) * page_size,
        page_size: Divisor::new(page_size as u32),
        slot_bytes: args.slot_mapping.dtype().size() as u32,
        num_kv_heads: args.key.extent(1) as u32,
        vectors: vectors.into(),
    }
}

/// Rows are whole vectors, each aligned to itself or to 16 bytes.
fn moves_vectors(tensor: &Tensor) -> bool {
    let bytes = (VECTOR as usize * tensor.dtype().size()).min(16) as u32;
    let dim = tensor.extent(tensor.rank() - 1);
    dim % i64::from(VECTOR) == 0 && row_alignment(tensor) >= bytes
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
    let v_bytes = state.v_stride_state * dtype.size() as i64;
    let s_bytes = state.s_stride_state * size_of::<f32>() as i64;
    State {
        v: state.v.wrapping_add_signed(v_bytes),
        s: state.s.wrapping_add_signed(s_bytes),
        ..state
    }
}

/// The kernel of two states, where it can.
fn merge_op(params: &MergeStatesParams) -> Op {
    let rows_are_vectors = params.vectors != 0 && params.head_dim > 0;
    if params.num_states == 2 && rows_are_vectors && params.head_dim <= VECTOR << params.log2_lanes
    {
        Op::MergeState
    } else {
        Op::MergeStates
    }
}

fn other_merge(op: Op) -> Option<Op> {
    match op {
        Op::MergeState => Some(Op::MergeStates),
        Op::MergeStates => Some(Op::MergeState),
        _ => None,
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
            num_heads: Divisor::new(self.v_out.extent(1).max(1) as u32),
            num_states: self.num_states,
            head_dim,
            flags: self.flags,
            vectors: vectors.into(),
            log2_lanes: pieces.max(1).next_power_of_two().min(32).trailing_zeros(),
        }
    }
}
