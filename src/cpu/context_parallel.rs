//! The operators of decode context parallelism: rows of several ranks are copied request by request, and outputs scaled
//! by their share of the softmax over all ranks' keys.
#![allow(unsafe_code)]

use super::cache::rows::{CHUNK, Chunk, Row};
use super::kernels::table::Kernels;
use super::threads::Pool;
use crate::error::{Error, Result};
use crate::plan::Ranks;
use crate::problem::{Checked, CpCorrectArgs, CpReorderArgs, LogBase};
use crate::tensor::Tensor;

/// Bytes per piece of work, as in `cache::append`.
const BYTES_PER_PIECE: usize = 64 << 10;

/// Copies the rows of all requests, each of them by one thread.
pub fn reorder(pool: &Pool, args: &Checked<CpReorderArgs>) -> Result<()> {
    let (Some(lens), Some(ends), Some(padded)) = (
        args.context_lens.as_i32(),
        args.cu_seq_lens.as_i32(),
        args.cu_padded_lens.as_i32(),
    ) else {
        return Err(Error::Internal(
            "lengths passed their checks and are no host integers".into(),
        ));
    };
    let ranks = Ranks {
        world_size: args.gathered.extent(0) as u64,
        interleave: args.interleave.into(),
    };
    let width = args.gathered.extent(2) as usize;
    let world_size = ranks.world_size as usize;
    // A piece is a request's rows of one rank.
    pool.turn().for_each(lens.len() * world_size, &|_, piece| {
        let (b, own) = (piece / world_size, (piece % world_size) as u64);
        let most = (padded[b + 1] - padded[b]) as u64;
        let held = |rank| {
            let local = ranks.local_length(lens[b] as u64, rank);
            local.saturating_sub(args.local_start.into()).min(most) as i64
        };
        let first = i64::from(ends[b]) + (0..own).map(held).sum::<i64>();
        for i in 0..held(own) {
            let from = [own as i64, i64::from(padded[b]) + i];
            let to = Row::of(&args.dst, &[first + i]);
            // SAFETY: `api` checked that the requests' rows are within both tensors.
            unsafe { to.copy(width, Row::of(&args.gathered, &from)) };
        }
    });
    Ok(())
}

/// Scales the rows of one rank.
pub fn correct(pool: &Pool, kernels: &Kernels, args: &Checked<CpCorrectArgs>) {
    let (heads, dim) = (args.o.extent(1) as usize, args.o.extent(2) as usize);
    let rows = args.o.extent(0) as usize * heads;
    let row_bytes = (dim * args.o.dtype().size()).max(1);
    let rows_per_piece = BYTES_PER_PIECE.div_ceil(row_bytes);
    pool.turn()
        .for_each(rows.div_ceil(rows_per_piece), &|_, piece| {
            let first = piece * rows_per_piece;
            for row in first..rows.min(first + rows_per_piece) {
                let at = [(row / heads) as i64, (row % heads) as i64];
                let (share, lse) = share_and_lse(args, at);
                scale(kernels, &args.o, &args.o_out, at, share);
                if let Some(out) = &args.lse_out {
                    out.set(&at, lse);
                }
            }
        });
}

/// The rank's share of the softmax, and the lse over all keys. In float64, of which a row needs a few numbers.
fn share_and_lse(args: &CpCorrectArgs, [token, head]: [i64; 2]) -> (f32, f32) {
    let to_e = match args.lse_base {
        LogBase::E => 1.0,
        LogBase::Two => std::f64::consts::LN_2,
    };
    let lse = |rank: i64| match args.lse_all.get(&[rank, token, head]) {
        lse if lse < f32::INFINITY => f64::from(lse) * to_e,
        // NaN and +inf: no keys.
        _ => f64::NEG_INFINITY,
    };
    let ranks = 0..args.lse_all.extent(0);
    let max = ranks.clone().map(lse).fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return (0.0, f32::NEG_INFINITY);
    }
    let weight = |rank| (lse(rank) - max).exp();
    let sum: f64 = ranks.map(weight).sum();
    let share = weight(args.rank.into()) / sum;
    (share as f32, ((max + sum.ln()) / to_e) as f32)
}

/// A row without a share is 0, whatever it holds.
fn scale(kernels: &Kernels, from: &Tensor, to: &Tensor, at: [i64; 2], share: f32) {
    let dim = from.extent(2) as usize;
    let (from, to) = (Row::of(from, &at), Row::of(to, &at));
    let mut chunk: Chunk = [0.0; CHUNK];
    for first in (0..dim).step_by(CHUNK) {
        let count = CHUNK.min(dim - first);
        // SAFETY: `api` checked both rows.
        unsafe {
            if share > 0.0 {
                from.skip(first).load(kernels, count, &mut chunk);
            }
            to.skip(first).store(kernels, count, &chunk, share);
        }
    }
}
