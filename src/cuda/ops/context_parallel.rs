//! The operators of decode context parallelism on a device, each one launch.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::keyless_kernel::{KeylessKernel, Workers};
use super::rows::moves_vectors;
use crate::backend::Stream;
use crate::cuda::compiler::loader::Loader;
use crate::cuda::context_parallel_params::{CpCorrectParams, CpReorderParams};
use crate::cuda::driver::Context;
use crate::cuda::kernels::keyless::{CP_CORRECT, CP_REORDER};
use crate::cuda::params::{Divisor, Rows, address, count, dtype_code, lse_flag, row_alignment};
use crate::error::Result;
use crate::problem::{Checked, CpCorrectArgs, CpReorderArgs};

/// The operators on one device.
#[derive(Debug)]
pub struct ContextParallel {
    reorder: KeylessKernel,
    correct: KeylessKernel,
}

impl ContextParallel {
    /// Loads nothing yet.
    pub fn new(loader: &Arc<Loader>, context: &Arc<Context>) -> ContextParallel {
        ContextParallel {
            reorder: KeylessKernel::new("cp_reorder", &CP_REORDER, loader, context),
            correct: KeylessKernel::new("cp_correct", &CP_CORRECT, loader, context),
        }
    }

    /// Puts records that were gathered rank by rank request by request.
    pub fn reorder(&self, args: &Checked<CpReorderArgs>, stream: Stream) -> Result<()> {
        let params = reorder_params(args)?;
        let rows = match params.batch_size {
            0 => 0,
            _ => params.num_rows as u64,
        };
        // SAFETY: the kernel takes a `FolioCpReorderParams`; the addresses are the caller's tensors, whose extents
        // `api` checked.
        unsafe {
            self.reorder
                .enqueue(&params, ("dst", Workers::Warps(rows)), stream)
        }
    }

    /// Scales one rank's output.
    pub fn correct(&self, args: &Checked<CpCorrectArgs>, stream: Stream) -> Result<()> {
        let params = correct_params(args)?;
        let rows = params.num_rows as u64;
        // SAFETY: as above, of a `FolioCpCorrectParams`.
        unsafe {
            self.correct
                .enqueue(&params, ("o", Workers::Warps(rows)), stream)
        }
    }
}

fn reorder_params(args: &CpReorderArgs) -> Result<CpReorderParams> {
    let (gathered, dst) = (&args.gathered, &args.dst);
    let size = gathered.dtype().size() as i64;
    let row_bytes = count("gathered", "bytes of a row", gathered.extent(2) * size)?;
    let is_aligned = [gathered, dst].iter().all(|rows| row_alignment(rows) == 16);
    // Where there is no second row a stride may be anything.
    let bytes = |stride: i64| stride.wrapping_mul(size);
    Ok(CpReorderParams {
        gathered: gathered.address() as u64,
        dst: dst.address() as u64,
        gathered_stride_rank: bytes(gathered.stride(0)),
        gathered_stride_row: bytes(gathered.stride(1)),
        dst_stride_row: bytes(dst.stride(0)),
        context_lens: args.context_lens.address() as u64,
        cu_seq_lens: args.cu_seq_lens.address() as u64,
        cu_padded_lens: args.cu_padded_lens.address() as u64,
        num_rows: dst.extent(0),
        rank_rows: gathered.extent(1),
        local_start: args.local_start.into(),
        batch_size: args.context_lens.extent(0) as u32,
        world_size: gathered.extent(0) as u32,
        interleave: args.interleave,
        row_bytes,
        unit_bytes: match is_aligned && row_bytes % 16 == 0 {
            true => 16,
            false => size as u32,
        },
        reserved: 0,
    })
}

fn correct_params(args: &CpCorrectArgs) -> Result<CpCorrectParams> {
    let (o, o_out, lse) = (&args.o, &args.o_out, &args.lse_all);
    let rows = count("o", "rows", o.extent(0) * o.extent(1))?;
    Ok(CpCorrectParams {
        lse_all: lse.address() as u64,
        lse_stride_rank: lse.stride(0),
        lse_stride_token: lse.stride(1),
        lse_stride_head: lse.stride(2),
        o: Rows::of(o),
        o_out: Rows::of(o_out),
        lse_out: address(args.lse_out),
        lse_out_stride_token: args.lse_out.map_or(0, |lse| lse.stride(0)),
        lse_out_stride_head: args.lse_out.map_or(0, |lse| lse.stride(1)),
        num_rows: rows.into(),
        num_heads: Divisor::new(o.extent(1) as u32),
        rank: args.rank,
        world_size: lse.extent(0) as u32,
        head_dim: o.extent(2) as u32,
        dtype: dtype_code(o.dtype()),
        flags: lse_flag(args.lse_base),
        vectors: [o, o_out].into_iter().all(moves_vectors).into(),
        reserved: 0,
    })
}
