//! Norm, RoPE and append on a device: new tokens go from a projection to the attention by one launch. Caches in other forms
//! than rows of plain elements have a kernel of their own.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::append::append_params;
use super::kernels::{Kernel, Kernels};
use super::keyless_kernel::{KeylessKernel, Workers};
use super::rows::{VECTOR, moves_vectors};
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::driver::{Context, blocks_of};
use crate::cuda::kernels::append::{AppendRows, AppendTypes, ROPE_APPEND, ROPE_APPEND_LOOSE};
use crate::cuda::kernels::keyless::ROPE_APPEND_STORED;
use crate::cuda::params::{Divisor, Rows, address, count, dtype_code};
use crate::cuda::rope_append_params::RopeAppendParams;
use crate::cuda::stored_params::{Stored, StoredRopeAppendParams};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{Angles, CacheForm, CacheFormat, Checked, MOST_PAIRS, RopeAppendArgs};
use crate::tensor::Tensor;

/// Elements of a row that a thread takes.
const ELEMENTS_OF_LANE: u32 = 2 * VECTOR;

/// Threads of a group that shares a row.
const MOST_LANES: u32 = 32;

/// The lanes that have a block of NVFP4.
const LEAST_LANES_OF_STORED: u32 = CacheFormat::NVFP4_BLOCK / VECTOR;

/// CTAs of every multiprocessor, `BLOCKS` of the kernel. Warps of more would take tokens in turn.
const BLOCKS_OF_MULTIPROCESSOR: u64 = 4;

/// Threads of a warp.
const WARP: u32 = 32;

/// Bytes that a thread has of a token.
const BYTES_OF_LANE: u32 = 64;

/// The kernels for a pair of types: where all rows move in vectors, and where some do not.
#[derive(Debug)]
struct OfTypes {
    vectors: Kernel,
    loose: Kernel,
}

/// The operator on one device.
#[derive(Debug)]
pub struct RopeAppend {
    kernels: Kernels<AppendTypes, OfTypes>,
    stored: KeylessKernel,
    sm_count: u32,
}

impl RopeAppend {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> RopeAppend {
        RopeAppend {
            kernels: Kernels::new("rope_append", loader, context),
            stored: KeylessKernel::new("rope_append", &ROPE_APPEND_STORED, loader, context),
            sm_count: context.device().sm_count,
        }
    }

    /// Computes rows, and writes keys and values to a paged cache.
    pub fn run(&self, args: &Checked<RopeAppendArgs>, stream: Stream) -> Result<()> {
        match args.append.form {
            CacheForm::Plain => self.plain(args, stream),
            _ => self.stored(args, stream),
        }
    }

    fn stored(&self, args: &RopeAppendArgs, stream: Stream) -> Result<()> {
        let params = stored_params(args)?;
        let of = ("q", Workers::Blocks(args.num_rows() as u64));
        // SAFETY: the kernel takes a `FolioStoredRopeAppendParams`; the addresses are the caller's tensors, whose extents
        // `api` checked.
        unsafe { self.stored.enqueue(&params, of, stream) }
    }

    fn plain(&self, args: &RopeAppendArgs, stream: Stream) -> Result<()> {
        let types = AppendTypes {
            source: args.append.key.dtype(),
            cache: args.append.k_cache.dtype(),
        };
        let mut params = params(args)?;
        let current = self.kernels.enter(stream)?;
        let kernels = self.kernels.get(&current, types, stream, |loader, cc| {
            let kernel = |rows: &'static AppendRows| {
                let found = loader.find(rows.candidates(types, cc), || rows.unsupported(types, cc));
                found.map(Kernel::new)
            };
            Ok(OfTypes {
                vectors: kernel(&ROPE_APPEND)?,
                loose: kernel(&ROPE_APPEND_LOOSE)?,
            })
        })?;
        let kernel = match params.vectors != 0 && params.append.vectors != 0 {
            true => &kernels.vectors,
            false => &kernels.loose,
        };
        let units = units_of_token(&params, types.source);
        params.units_of_token = Divisor::new(units);
        let blocks = blocks_of(
            "q",
            blocks(
                args.num_rows() as u64,
                units.into(),
                kernel.threads(),
                self.sm_count,
            ),
        )?;
        // SAFETY: the kernel takes a `FolioRopeAppendParams`; the addresses are the caller's tensors, whose extents
        // `api` checked.
        unsafe { kernel.enqueue(&current, &params, blocks, stream) }
    }
}

fn stored_params(args: &RopeAppendArgs) -> Result<StoredRopeAppendParams> {
    let append = &args.append;
    let mut rope = params(args)?;
    rope.log2_lanes = rope.log2_lanes.max(LEAST_LANES_OF_STORED.ilog2());
    // The kernel counts the elements of a row, and those of its last step.
    let dim = append.value.extent(2);
    count(
        "value",
        "elements of a row",
        dim + i64::from(MOST_LANES * VECTOR),
    )?;
    Ok(StoredRopeAppendParams {
        rope,
        cache: Stored::of(&append.caches(), [append.k_scale, append.v_scale]),
        row_dtype: dtype_code(append.key.dtype()),
        value_vectors: moves_vectors(&append.value).into(),
    })
}

/// All but how many warps share a token.
///
/// # Errors
/// [`Error::Unsupported`] for rows that a warp does not hold.
pub fn params(args: &RopeAppendArgs) -> Result<RopeAppendParams> {
    let append = append_params(&args.append)?;
    let rope = args.rope.as_ref();
    let dim = args.append.key.extent(2) as u32;
    let rotary_dim = rope.map_or(0, |rope| rope.rotary_dim);
    let num_q_heads = args.q.map_or(0, |q| q.extent(1));
    let all_heads = num_q_heads + 2 * args.append.key.extent(1);
    count("q", "heads of queries, keys and values", all_heads)?;
    let table = rope.and_then(|rope| match rope.angles {
        Angles::Table(table) => Some(table),
        Angles::Computed(_) => None,
    });
    let [cos, sin] = [0, 1].map(|plane| table.map(|table| table.narrow(0, plane, 1)));
    let positions = rope.map(|rope| rope.positions);
    let offsets = rope.and_then(|rope| rope.position_offsets);
    let rows = |tensor: Option<Tensor>| tensor.map_or(Rows::default(), |rows| Rows::of(&rows));
    let bytes = |tensor: Option<Tensor>| tensor.map_or(0, |tensor| tensor.dtype().size() as u32);
    let dtype = |tensor: Option<Tensor>| tensor.map_or(0, |tensor| dtype_code(tensor.dtype()));
    let vectors = tensors(args, table).all(|tensor| moves_vectors(&tensor))
        // Halves of what is rotated, and neighbours of eight pairs, are whole vectors.
        && rotary_dim.is_multiple_of(2 * VECTOR);
    Ok(RopeAppendParams {
        append,
        q: rows(args.q),
        q_out: rows(args.q_out),
        key_out: rows(args.key_out),
        q_weight: address(args.norm.q_weight),
        k_weight: address(args.norm.k_weight),
        cos: address(cos),
        sin: address(sin),
        cos_sin_stride: table.map_or(0, |table| table.stride(1)),
        max_position: table.map_or(0, |table| table.extent(1)),
        positions: address(positions),
        offsets: address(offsets),
        num_q_rows: args.q.map_or(0, |q| q.extent(0)),
        units_of_token: Divisor::new(1),
        log2_lanes: lanes(rotary_dim, dim)?.ilog2(),
        num_q_heads: num_q_heads as u32,
        rotary_dim,
        position_bytes: bytes(positions),
        offset_bytes: bytes(offsets),
        q_weight_dtype: dtype(args.norm.q_weight),
        k_weight_dtype: dtype(args.norm.k_weight),
        cos_sin_dtype: dtype(table),
        is_interleaved: rope.is_some_and(|rope| rope.is_interleaved).into(),
        vectors: vectors.into(),
        rms_norm_eps: args.norm.eps,
        turns: match rope.map(|rope| rope.angles) {
            Some(Angles::Computed(frequencies)) => frequencies.turns(rotary_dim),
            _ => [0; MOST_PAIRS],
        },
    })
}

/// Warps that a token has work for, as the kernel deals it: of queries, of keys and of values.
fn units_of_token(params: &RopeAppendParams, source: DType) -> u32 {
    let pieces = BYTES_OF_LANE / (VECTOR * source.size() as u32);
    let rows = pieces / 2 * (WARP >> params.log2_lanes);
    let heads = params.append.num_kv_heads;
    let values = heads * params.append.v.pieces.divisor;
    params.num_q_heads.div_ceil(rows) + heads.div_ceil(rows) + values.div_ceil(WARP * pieces)
}

/// CTAs of a launch: as many whole tokens at a time as multiprocessors have room for, but at least one.
fn blocks(tokens: u64, units: u64, threads: u32, sm_count: u32) -> u64 {
    let warps = u64::from(threads / WARP);
    let room = u64::from(sm_count) * BLOCKS_OF_MULTIPROCESSOR * warps;
    let at_once = tokens.min((room / units).max(1));
    (at_once * units).div_ceil(warps)
}

/// Threads of a group: rotated elements and others have threads of their own.
fn lanes(rotary_dim: u32, dim: u32) -> Result<u32> {
    let lanes = [rotary_dim, dim - rotary_dim].map(|part| part.div_ceil(ELEMENTS_OF_LANE));
    let lanes = (lanes[0] + lanes[1]).max(1).next_power_of_two();
    if lanes <= MOST_LANES {
        return Ok(lanes);
    }
    Err(Error::Unsupported(format!(
        "rotary_dim: {rotary_dim} of rows of {dim} elements is not supported; a multiple of {ELEMENTS_OF_LANE} is"
    )))
}

/// Those whose rows move in pieces, but for values. Rows of other forms than plain ones move as their own parameters say.
fn tensors(args: &RopeAppendArgs, table: Option<Tensor>) -> impl Iterator<Item = Tensor> {
    [
        Some(args.append.key),
        (args.append.form == CacheForm::Plain).then_some(args.append.k_cache),
        args.key_out,
        args.q,
        args.q_out,
        args.norm.q_weight,
        args.norm.k_weight,
        table,
    ]
    .into_iter()
    .flatten()
}
