//! Packing: queries, keys and values of one KV head as the contiguous blocks of `kernels::bf16_block`.
//!
//! Scores and outputs are computed transposed, as k · qᵀ and vᵀ · p. So keys (A) are copied as they lie, queries (B)
//! are transposed as 32-bit words once per item, and values (A) are transposed two keys at a time. Keys and values
//! of a tile are packed once for all rows of an item. Numbers that are not bf16 are packed as their parts
//! (`kernels::bf16_split`).
#![allow(unsafe_code)]

use super::run::Run;
use super::scratch::Scratch;
use crate::cpu::kernels::bf16_block::{ELEMENTS, SIDE};
use crate::cpu::kernels::bf16_split::{self, Split};
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::transpose::{BLOCK, Transpose};
use crate::cpu::x86::bf16_vectors::pair_rows;
use crate::dtype::DType;
use std::ops::Range;

/// Packs a strip of an item's queries, from row `first` on, as blocks of B: part `i` at depth `d` starts at
/// `q16[(first · ld_qk + d · 32) · parts + i · 1024]`. The last strip repeats the last row of the item. Returns
/// whether every number has parts.
pub fn queries(run: &Run<'_>, queries: &Rows, first: usize, scratch: &mut Scratch<'_>) -> bool {
    let ld = run.shape.ld_qk;
    let count = run.shape.bf16_parts.q;
    let strip = &mut scratch.q16[first * count * ld..][..SIDE * count * ld];
    assert!(queries.count > first);
    let mut staging = Staging {
        run,
        dtype: run.q_dtype,
        dim: run.shape.dim_qk,
        staged: scratch.staged16,
    };
    [0, BLOCK].into_iter().all(|half| {
        let rows = queries.skip((first + half).min(queries.count - 1));
        staging.rows(rows.part(0..BLOCK), |part, rows| {
            for depth in 0..ld / SIDE {
                let at = (depth * count + part) * ELEMENTS + 2 * half;
                let transpose = Transpose {
                    rows: Rows {
                        base: rows.base.wrapping_add(2 * depth * SIDE),
                        ..rows
                    },
                    dst: strip[at..].as_mut_ptr().cast(),
                    ld: SIDE,
                    columns: BLOCK,
                };
                // SAFETY: the rows lie inside q or are staged; a block holds 16 rows of 32 words.
                unsafe { (run.kernels.transpose)(&transpose) };
            }
            true
        })
    })
}

/// Packs keys of the next tile, from the first of a group on, as blocks of A: of group `g`, part `i` at depth `d`
/// starts at `k16[(g · ld_qk + d) · 32 · parts + i · 1024]`. Keys past the last one hold anything. Returns whether
/// every number has parts.
pub fn keys(run: &Run<'_>, head: usize, range: Range<usize>, scratch: &mut Scratch<'_>) -> bool {
    let ld = run.shape.ld_qk;
    let count = run.shape.bf16_parts.kv;
    let mut staging = Staging {
        run,
        dtype: run.row_dtype,
        dim: run.shape.dim_qk,
        staged: scratch.staged16,
    };
    range.clone().step_by(SIDE).all(|start| {
        let (next, keys) = (&mut scratch.next_tile, start..range.end.min(start + SIDE));
        let keys = run.k.whole(head, next, keys, &mut scratch.joined);
        let group = &mut next.k16[start * count * ld..][..SIDE * count * ld];
        staging.rows(keys, |part, rows| {
            for j in 0..rows.count {
                for depth in 0..ld / SIDE {
                    let at = (depth * count + part) * ELEMENTS + j * SIDE;
                    let to = group[at..][..SIDE].as_mut_ptr();
                    // SAFETY: the row holds `ld` elements.
                    unsafe {
                        let from = rows.at_row(j).add(2 * depth * SIDE);
                        to.cast::<[u8; 64]>()
                            .write_unaligned(from.cast::<[u8; 64]>().read_unaligned());
                    }
                }
            }
            true
        })
    })
}

/// Start of the blocks of A with 32 columns of a group of values, part by part. The blocks of all groups follow one
/// another, in the order in which they are read.
pub fn value_blocks(run: &Run<'_>, column: usize, group: usize) -> usize {
    (column * run.shape.bf16_key_tile + group * ELEMENTS) * run.shape.bf16_parts.kv
}

/// Packs values of the next tile, from the first of a group on, transposed, as blocks of A. Values past the last one
/// are zero. Returns whether every number is finite and has parts.
pub fn values(run: &Run<'_>, head: usize, range: Range<usize>, scratch: &mut Scratch<'_>) -> bool {
    let (dim, ld) = (run.shape.dim_vo, run.shape.ld_vo);
    let all = run.v.rows(head, &scratch.next_tile.v_offsets[..range.end]);
    let pairs = scratch.staged.as_mut_ptr();
    assert!(scratch.staged.len() >= BLOCK * ld);
    let pair_offsets: [i64; BLOCK] = std::array::from_fn(|i| (4 * i * ld) as i64);
    let mut staging = Staging {
        run,
        dtype: run.row_dtype,
        dim,
        staged: scratch.staged16,
    };
    range.step_by(SIDE).all(|start| {
        staging.rows(all.part(start..start + SIDE), |part, rows| {
            // SAFETY: the values were located within the cache or are staged; there is room for 16 rows of
            // pairs.
            let finite = unsafe { pair_rows(&rows, dim, pairs.cast(), ld) };
            for column in (0..ld).step_by(SIDE) {
                let at = value_blocks(run, column, start / SIDE) + part * ELEMENTS;
                let transpose = Transpose {
                    rows: Rows {
                        base: pairs.wrapping_add(column).cast(),
                        offsets: pair_offsets.as_ptr(),
                        count: BLOCK,
                    },
                    dst: scratch.next_tile.v16[at..][..ELEMENTS].as_mut_ptr().cast(),
                    ld: BLOCK,
                    columns: SIDE,
                };
                // SAFETY: the pairs were just written; a block holds 32 columns of 16 pairs.
                unsafe { (run.kernels.transpose)(&transpose) };
            }
            finite
        })
    })
}

/// Memory where rows become bf16, up to 32 at a time. Columns are padded with zeros to a multiple of 32.
struct Staging<'a> {
    run: &'a Run<'a>,
    dtype: DType,
    dim: usize,
    staged: &'a mut [u16],
}

impl Staging<'_> {
    /// Calls `pack` with each part of the rows. bf16 rows of whole blocks are passed as they lie; all others are
    /// staged. Returns whether every number has parts and every call returned true.
    fn rows(&mut self, rows: Rows, mut pack: impl FnMut(usize, Rows) -> bool) -> bool {
        let dim = self.dim;
        let (ld, parts) = (dim.next_multiple_of(SIDE), bf16_split::count(self.dtype));
        if self.dtype == DType::BF16 && dim == ld {
            return pack(0, rows);
        }
        assert!(rows.count <= SIDE && self.staged.len() >= parts * SIDE * ld);
        let split = Split {
            rows,
            dim,
            parts,
            dst: self.staged.as_mut_ptr(),
            stride: SIDE * ld,
            ld,
        };
        // SAFETY: the rows lie in the cache or in q; `staged` holds 32 rows of every part.
        let all = unsafe { self.run.kernels.split[self.dtype as usize](&split) };
        let offsets: [i64; SIDE] = std::array::from_fn(|j| (2 * j * ld) as i64);
        all && (0..parts).all(|part| {
            let staged = Rows {
                base: self.staged[part * SIDE * ld..].as_ptr().cast(),
                offsets: offsets.as_ptr(),
                count: rows.count,
            };
            pack(part, staged)
        })
    }
}
