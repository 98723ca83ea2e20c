//! The walk for many bf16 query rows on AMX: as `panel`, with keys, values, queries and weights in bf16
//! and both products on tiles. Scores, softmax and sums stay in f32.
#![allow(unsafe_code)]

use super::amx::{self, Tiles, UNIT};
use super::panel;
use super::product::{Panel, Product};
use super::rows::{Rows, Stage, Store};
use super::run::{Item, Run, Scores};
use super::scratch::Pad;
use super::shape::{KEY_TILE, SCORE_LD};
use super::transpose::{BLOCK, Transpose};
use crate::dtype::DType;
use std::ops::Range;

/// Computes an item of any number of rows.
pub fn walk(run: &Run<'_>, item: &Item<'_>, pad: &mut Pad<'_>) {
    // SAFETY: this walk is picked only where AMX is available.
    let tiles = unsafe { Tiles::new() };
    for head in 0..run.shape.num_kv_heads {
        copy_queries(run, item, head, pad.q16, pad.q_offsets);
        pad.o[..item.rows * run.shape.ld_vo].fill(0.0);
        pad.max[..item.rows].fill(f32::NEG_INFINITY);
        pad.sum[..item.rows].fill(0.0);
        let mut start = item.keys.start;
        while start < item.keys.end {
            let keys = start..item.keys.end.min(start + KEY_TILE as i64);
            panel::ask_for_next(run, item, head, keys.end, pad);
            tile(run, &tiles, item, head, &keys, pad);
            start = keys.end;
        }
        run.finish(item, head, pad.o, pad.max, pad.sum);
    }
}

/// Copies the queries of a head, columns padded with zeros.
fn copy_queries(run: &Run<'_>, item: &Item<'_>, head: usize, to: &mut [u16], offsets: &mut [i64]) {
    run.locate_queries(item, head, offsets);
    let rows = to.chunks_exact_mut(run.shape.ld_qk);
    for (offset, to) in offsets[..item.rows].iter().zip(rows) {
        let from = run.q_base().wrapping_offset(*offset as isize);
        // SAFETY: the row lies inside q, which was checked.
        unsafe { copy_row(from, run.shape.dim_qk, to) };
    }
}

/// # Safety
/// `dim` elements must be readable at `from`.
unsafe fn copy_row(from: *const u8, dim: usize, to: &mut [u16]) {
    // SAFETY: the caller's promise; `to` holds at least `dim`.
    unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr().cast(), 2 * dim) };
    to[dim..].fill(0);
}

fn tile(
    run: &Run<'_>,
    tiles: &Tiles,
    item: &Item<'_>,
    head: usize,
    keys: &Range<i64>,
    pad: &mut Pad<'_>,
) {
    let n = (keys.end - keys.start) as usize;
    run.locate(item.request, keys.clone(), pad.here.k, pad.here.v);
    if !pack_values(run, head, n, pad) {
        // A weight of 0 must not meet an infinity or NaN; the f32 walk knows how.
        run.load_queries(item, head, pad.q, pad.q_offsets);
        panel::tile(run, item, head, keys, pad);
        return;
    }
    pack_keys(run, head, n, pad);
    let mut first = 0;
    while first < item.tokens {
        let tokens = first..item.tokens.min(first + run.shape.block_tokens);
        block(run, tiles, item, head, keys, &tokens, pad);
        first = tokens.end;
    }
}

/// Some tokens against the part of the tile that they see.
fn block(
    run: &Run<'_>,
    tiles: &Tiles,
    item: &Item<'_>,
    head: usize,
    keys: &Range<i64>,
    tokens: &Range<usize>,
    pad: &mut Pad<'_>,
) {
    let Some(seen) = item.seen(tokens, keys, UNIT) else {
        return;
    };
    let group = run.shape.group;
    let rows = tokens.start * group..tokens.end * group;
    scores(run, tiles, &rows, &seen, pad);
    let seen_keys = keys.start + seen.start as i64..keys.start + seen.end as i64;
    let state = Scores {
        s: pad.s,
        p16: Some(pad.p16),
        limits: pad.limits,
        max: &mut pad.max[rows.start..],
        sum: &mut pad.sum[rows.start..],
        alpha: pad.alpha,
    };
    run.softmax(item, head, tokens, &seen_keys, state);
    // Rows of padding are the next block's in `o`; adding nothing leaves them as they are.
    let padded = rows.len().next_multiple_of(UNIT);
    pad.p16[rows.len() * SCORE_LD..padded * SCORE_LD].fill(0);
    rescale(run, &rows, pad);
    accumulate(run, tiles, &rows, &seen, pad);
}

/// `s = q · kᵀ`; a strip of keys stays in first-level cache for all rows.
fn scores(
    run: &Run<'_>,
    tiles: &Tiles,
    rows: &Range<usize>,
    seen: &Range<usize>,
    pad: &mut Pad<'_>,
) {
    let ld = run.shape.ld_qk;
    let padded = rows.len().next_multiple_of(UNIT);
    assert!(pad.q16.len() >= (rows.start + padded) * ld && pad.s.len() >= padded * SCORE_LD);
    for column in (seen.start..seen.end).step_by(UNIT) {
        for row in (0..padded).step_by(UNIT) {
            // SAFETY: the panel holds the tile's strips; q and s were checked.
            unsafe {
                tiles.block(
                    pad.q16.as_ptr().add((rows.start + row) * ld),
                    2 * ld,
                    pad.k16.as_ptr().add(column * ld),
                    pad.s.as_mut_ptr().add(row * SCORE_LD + column - seen.start),
                    4 * SCORE_LD,
                    ld / UNIT,
                    false,
                );
            }
        }
    }
}

/// `o = alpha · o` where a maximum has grown.
fn rescale(run: &Run<'_>, rows: &Range<usize>, pad: &mut Pad<'_>) {
    if pad.alpha[..rows.len()].iter().all(|&alpha| alpha == 1.0) {
        return;
    }
    let ld = run.shape.ld_vo;
    let product = Product {
        a: pad.s.as_ptr(),
        lda: 0,
        rows: rows.len(),
        depth: 0,
        b: Panel {
            base: std::ptr::null(),
            ld: 0,
        },
        columns: ld,
        c: pad.o[rows.start * ld..rows.end * ld].as_mut_ptr(),
        ldc: ld,
        alpha: pad.alpha.as_ptr(),
    };
    // SAFETY: o and alpha hold the rows; without depth nothing else is read.
    unsafe { (run.kernels.product)(&product) };
}

/// `o += p · v`.
fn accumulate(
    run: &Run<'_>,
    tiles: &Tiles,
    rows: &Range<usize>,
    seen: &Range<usize>,
    pad: &mut Pad<'_>,
) {
    let ld = run.shape.ld_vo;
    let padded = rows.len().next_multiple_of(UNIT);
    assert!(pad.o.len() >= (rows.start + padded) * ld && pad.p16.len() >= padded * SCORE_LD);
    for column in (0..ld).step_by(UNIT) {
        for row in (0..padded).step_by(UNIT) {
            // SAFETY: the panel holds the tile's values; o and p were checked.
            unsafe {
                tiles.block(
                    pad.p16.as_ptr().add(row * SCORE_LD),
                    2 * SCORE_LD,
                    pad.v16.as_ptr().add(column * KEY_TILE + seen.start * UNIT),
                    pad.o.as_mut_ptr().add((rows.start + row) * ld + column),
                    4 * ld,
                    seen.len().div_ceil(UNIT),
                    true,
                );
            }
        }
    }
}

/// Keys as B over the depth of the head dimension: pairs of elements are 32-bit words, so it is a
/// transposition of words, straight from the cache where the head dimension is whole tiles of bf16.
fn pack_keys(run: &Run<'_>, head: usize, n: usize, pad: &mut Pad<'_>) {
    let (dim, ld) = (run.shape.dim_qk, run.shape.ld_qk);
    let staged_offsets = staged_offsets(ld);
    for start in (0..n).step_by(BLOCK) {
        let mut rows = run.k.rows(head, &pad.here.k[start..n.min(start + BLOCK)]);
        if run.kv_dtype != DType::BF16 || dim < ld {
            bf16_rows(run, &rows, dim, ld, pad.staged, pad.staged16);
            rows.base = pad.staged16.as_ptr().cast();
            rows.offsets = staged_offsets.as_ptr();
        }
        let dst = &mut pad.k16[start / UNIT * UNIT * ld + start % UNIT * 2..];
        assert!(dst.len() >= (ld / 2 - 1) * 2 * UNIT + 32);
        let transpose = Transpose {
            rows,
            dst: dst.as_mut_ptr().cast(),
            ld: UNIT,
            columns: ld / 2,
        };
        // SAFETY: the keys were located within the cache, or are staged; the panel was just checked.
        unsafe { (run.kernels.transpose)(&transpose) };
    }
}

/// Values as B over the depth of keys; whether all are finite.
fn pack_values(run: &Run<'_>, head: usize, n: usize, pad: &mut Pad<'_>) -> bool {
    let (dim, ld) = (run.shape.dim_vo, run.shape.ld_vo);
    assert!(pad.v16.len() >= ld * KEY_TILE);
    let strip = UNIT * KEY_TILE;
    if run.kv_dtype == DType::BF16 {
        let rows = run.v.rows(head, &pad.here.v[..n]);
        // SAFETY: the values were located within the cache; the panel was checked.
        return unsafe { amx::interleave(&rows, dim, pad.v16.as_mut_ptr(), strip) };
    }
    let staged_offsets = staged_offsets(ld);
    let mut finite = true;
    for start in (0..n).step_by(UNIT) {
        let mut rows = run.v.rows(head, &pad.here.v[start..n.min(start + UNIT)]);
        bf16_rows(run, &rows, dim, ld, pad.staged, pad.staged16);
        rows.base = pad.staged16.as_ptr().cast();
        rows.offsets = staged_offsets.as_ptr();
        let dst = pad.v16[start * UNIT..].as_mut_ptr();
        // SAFETY: as above.
        finite &= unsafe { amx::interleave(&rows, dim, dst, strip) };
    }
    finite
}

/// Byte offsets of staged bf16 rows.
fn staged_offsets(ld: usize) -> [i64; UNIT] {
    std::array::from_fn(|j| (2 * j * ld) as i64)
}

/// Copies up to 32 rows of the cache as bf16, to which fp8 converts exactly; columns padded with zeros.
fn bf16_rows(
    run: &Run<'_>,
    rows: &Rows,
    dim: usize,
    ld: usize,
    staged: &mut [f32],
    staged16: &mut [u16],
) {
    assert!(rows.count <= UNIT && staged.len() >= UNIT * ld && staged16.len() >= UNIT * ld);
    if run.kv_dtype == DType::BF16 {
        for j in 0..rows.count {
            // SAFETY: the rows lie in the cache.
            unsafe { copy_row(rows.at_row(j), dim, &mut staged16[j * ld..][..ld]) };
        }
        return;
    }
    let stage = Stage {
        rows: *rows,
        dim,
        dst: staged.as_mut_ptr(),
        width: ld,
        strip: 0,
    };
    // SAFETY: as above; both buffers hold 32 rows. The stage fills columns up to a multiple of 16, and
    // `ld` may be one more such step.
    unsafe {
        run.kernels.stage[run.kv_dtype as usize](&stage);
        for j in 0..rows.count {
            staged[j * ld + dim.next_multiple_of(16)..(j + 1) * ld].fill(0.0);
            let store = Store {
                src: staged[j * ld..].as_ptr(),
                factor: 1.0,
                dst: staged16[j * ld..].as_mut_ptr().cast(),
                dim: ld,
            };
            run.kernels.store[DType::BF16 as usize](&store);
        }
    }
}
