//! Operands for AMX: queries, keys and values of one KV head as the contiguous blocks of `amx`.
//!
//! Scores are computed transposed, k · qᵀ, and so are outputs, vᵀ · p. Keys (A) are then copied as they
//! lie; queries (B) are a transposition of 32-bit words, once per item; values (A) are transposed, two
//! keys at a time. Keys and values of a tile are packed once for all rows of an item.
#![allow(unsafe_code)]

use super::amx::{self, SIDE};
use super::rows::{Rows, Stage, Store};
use super::run::Run;
use super::scratch::Pad;
use super::shape::KEY_TILE;
use super::transpose::{BLOCK, Transpose};
use crate::dtype::DType;
use std::ops::Range;

/// Elements of a block.
pub const ELEMENTS: usize = SIDE * SIDE;

/// A strip of an item's queries, from row `first` on, as blocks of B: that of depth `d` starts at
/// `q16[first · ld_qk + d · 32]`. Rows that make up the item's last strip repeat its last.
pub fn queries(run: &Run<'_>, queries: &Rows, first: usize, pad: &mut Pad<'_>) {
    let (dim, ld) = (run.shape.dim_qk, run.shape.ld_qk);
    let staged_offsets = staged_offsets(ld);
    let strip = &mut pad.q16[first * ld..][..SIDE * ld];
    assert!(queries.count > first && pad.staged16.len() >= SIDE * ld);
    for half in [0, BLOCK] {
        let mut rows = queries.skip((first + half).min(queries.count - 1));
        rows.count = rows.count.min(BLOCK);
        if dim < ld {
            for j in 0..rows.count {
                // SAFETY: the row lies inside q, which was checked.
                unsafe { copy_row(rows.at_row(j), dim, &mut pad.staged16[j * ld..][..ld]) };
            }
            rows.base = pad.staged16.as_ptr().cast();
            rows.offsets = staged_offsets.as_ptr();
        }
        let transpose = Transpose {
            rows,
            dst: strip[2 * half..].as_mut_ptr().cast(),
            ld: SIDE,
            columns: ld / 2,
        };
        // SAFETY: the rows lie inside q or are staged; a strip holds `ld / 2` rows of 32 words.
        unsafe { (run.kernels.transpose)(&transpose) };
    }
}

/// Keys of the next tile, from the first of a group on, as blocks of A: those of group `g` and of depth `d`
/// start at `k16[(g · ld_qk + d) · 32]`. What makes up the last group holds anything.
pub fn keys(run: &Run<'_>, head: usize, range: Range<usize>, pad: &mut Pad<'_>) {
    let (dim, ld) = (run.shape.dim_qk, run.shape.ld_qk);
    let staged_offsets = staged_offsets(ld);
    let all = run.k.rows(head, &pad.next.k_offsets[..range.end]);
    assert!(pad.next.k16.len() >= range.end.next_multiple_of(SIDE) * ld);
    for start in range.step_by(SIDE) {
        let mut rows = all.part(start..start + SIDE);
        if run.kv_dtype != DType::BF16 || dim < ld {
            bf16_rows(run, &rows, dim, ld, pad.staged, pad.staged16);
            rows.base = pad.staged16.as_ptr().cast();
            rows.offsets = staged_offsets.as_ptr();
        }
        let group = pad.next.k16[start * ld..].as_mut_ptr();
        for j in 0..rows.count {
            for depth in (0..ld).step_by(SIDE) {
                // SAFETY: the row holds `ld` elements, the group all blocks of 32 rows.
                unsafe {
                    let from = rows.at_row(j).add(2 * depth);
                    let to = group.add((depth + j) * SIDE);
                    to.cast::<[u8; 64]>()
                        .write_unaligned(from.cast::<[u8; 64]>().read_unaligned());
                }
            }
        }
    }
}

/// Where the block of A with 32 columns of a group's values starts: those of all groups lie in a row, as
/// they are read.
pub fn value_block(column: usize, group: usize) -> usize {
    column * KEY_TILE + group * ELEMENTS
}

/// Values of the next tile, from the first of a group on, transposed, as blocks of A. What makes up the last
/// group is zero. Returns whether all are finite.
pub fn values(run: &Run<'_>, head: usize, range: Range<usize>, pad: &mut Pad<'_>) -> bool {
    let (dim, ld) = (run.shape.dim_vo, run.shape.ld_vo);
    let staged_offsets = staged_offsets(ld);
    assert!(pad.staged.len() >= BLOCK * ld);
    let all = run.v.rows(head, &pad.next.v_offsets[..range.end]);
    let mut finite = true;
    for start in range.step_by(SIDE) {
        let mut rows = all.part(start..start + SIDE);
        if run.kv_dtype != DType::BF16 {
            bf16_rows(run, &rows, dim, ld, pad.staged, pad.staged16);
            rows.base = pad.staged16.as_ptr().cast();
            rows.offsets = staged_offsets.as_ptr();
        }
        let pairs = pad.staged.as_mut_ptr();
        // SAFETY: the values were located within the cache or are staged; there is room for 16 rows of
        // pairs.
        finite &= unsafe { amx::pair_rows(&rows, dim, pairs.cast(), ld) };
        let pair_offsets: [i64; BLOCK] = std::array::from_fn(|i| (4 * i * ld) as i64);
        for column in (0..ld).step_by(SIDE) {
            let block = &mut pad.next.v16[value_block(column, start / SIDE)..][..ELEMENTS];
            let transpose = Transpose {
                rows: Rows {
                    base: pairs.wrapping_add(column).cast(),
                    offsets: pair_offsets.as_ptr(),
                    count: BLOCK,
                },
                dst: block.as_mut_ptr().cast(),
                ld: BLOCK,
                columns: SIDE,
            };
            // SAFETY: the pairs were just written; a block holds 32 columns of 16 pairs.
            unsafe { (run.kernels.transpose)(&transpose) };
        }
    }
    finite
}

/// Byte offsets of staged bf16 rows.
fn staged_offsets(ld: usize) -> [i64; SIDE] {
    std::array::from_fn(|j| (2 * j * ld) as i64)
}

/// # Safety
/// `dim` elements must be readable at `from`.
unsafe fn copy_row(from: *const u8, dim: usize, to: &mut [u16]) {
    // SAFETY: the caller's promise; `to` holds at least `dim`.
    unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr().cast(), 2 * dim) };
    to[dim..].fill(0);
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
    assert!(rows.count <= SIDE && staged.len() >= SIDE * ld && staged16.len() >= SIDE * ld);
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
