//! Operands of products by blocks: queries, keys and values of one KV head as the contiguous blocks of `bf16_block`.
//!
//! Scores are computed transposed, k · qᵀ, and so are outputs, vᵀ · p. Keys (A) are then copied as they
//! lie; queries (B) are a transposition of 32-bit words, once per item; values (A) are transposed, two
//! keys at a time. Keys and values of a tile are packed once for all rows of an item. What is not bf16 is packed as
//! its limbs (`bf16_split`).
#![allow(unsafe_code)]

use super::run::Run;
use super::scratch::Pad;
use super::shape::TILED_KEYS;
use crate::cpu::kernels::bf16_block::{ELEMENTS, SIDE};
use crate::cpu::kernels::bf16_split::{self, Split};
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::transpose::{BLOCK, Transpose};
use crate::cpu::x86::bf16_vectors::pair_rows;
use crate::dtype::DType;
use std::ops::Range;

/// A strip of an item's queries, from row `first` on, as blocks of B: limb `i` at depth `d` starts at
/// `q16[(first · ld_qk + d · 32) · limbs + i · 1024]`. Rows that make up the item's last strip repeat its last.
/// Returns whether all have limbs.
pub fn queries(run: &Run<'_>, queries: &Rows, first: usize, pad: &mut Pad<'_>) -> bool {
    let ld = run.shape.ld_qk;
    let count = run.shape.limbs.q;
    let strip = &mut pad.q16[first * count * ld..][..SIDE * count * ld];
    assert!(queries.count > first);
    let mut staging = Staging {
        run,
        dtype: run.q_dtype,
        dim: run.shape.dim_qk,
        staged: pad.staged16,
    };
    [0, BLOCK].into_iter().all(|half| {
        let rows = queries.skip((first + half).min(queries.count - 1));
        staging.rows(rows.part(0..BLOCK), |limb, rows| {
            for depth in 0..ld / SIDE {
                let at = (depth * count + limb) * ELEMENTS + 2 * half;
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

/// Keys of the next tile, from the first of a group on, as blocks of A: of group `g`, limb `i` at depth `d` starts
/// at `k16[(g · ld_qk + d) · 32 · limbs + i · 1024]`. What makes up the last group holds anything. Returns whether
/// all have limbs.
pub fn keys(run: &Run<'_>, head: usize, range: Range<usize>, pad: &mut Pad<'_>) -> bool {
    let ld = run.shape.ld_qk;
    let count = run.shape.limbs.kv;
    let all = run.k.rows(head, &pad.next.k_offsets[..range.end]);
    let mut staging = Staging {
        run,
        dtype: run.kv_dtype,
        dim: run.shape.dim_qk,
        staged: pad.staged16,
    };
    range.step_by(SIDE).all(|start| {
        let group = &mut pad.next.k16[start * count * ld..][..SIDE * count * ld];
        staging.rows(all.part(start..start + SIDE), |limb, rows| {
            for j in 0..rows.count {
                for depth in 0..ld / SIDE {
                    let at = (depth * count + limb) * ELEMENTS + j * SIDE;
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

/// Where the blocks of A with 32 columns of a group's values start, limb by limb: those of all groups lie in a row,
/// as they are read.
pub fn value_blocks(limbs: usize, column: usize, group: usize) -> usize {
    (column * TILED_KEYS + group * ELEMENTS) * limbs
}

/// Values of the next tile, from the first of a group on, transposed, as blocks of A. What makes up the last
/// group is zero. Returns whether all are finite and have limbs.
pub fn values(run: &Run<'_>, head: usize, range: Range<usize>, pad: &mut Pad<'_>) -> bool {
    let (dim, ld) = (run.shape.dim_vo, run.shape.ld_vo);
    let count = run.shape.limbs.kv;
    let all = run.v.rows(head, &pad.next.v_offsets[..range.end]);
    let pairs = pad.staged.as_mut_ptr();
    assert!(pad.staged.len() >= BLOCK * ld);
    let pair_offsets: [i64; BLOCK] = std::array::from_fn(|i| (4 * i * ld) as i64);
    let mut staging = Staging {
        run,
        dtype: run.kv_dtype,
        dim,
        staged: pad.staged16,
    };
    range.step_by(SIDE).all(|start| {
        staging.rows(all.part(start..start + SIDE), |limb, rows| {
            // SAFETY: the values were located within the cache or are staged; there is room for 16 rows of
            // pairs.
            let finite = unsafe { pair_rows(&rows, dim, pairs.cast(), ld) };
            for column in (0..ld).step_by(SIDE) {
                let at = value_blocks(count, column, start / SIDE) + limb * ELEMENTS;
                let transpose = Transpose {
                    rows: Rows {
                        base: pairs.wrapping_add(column).cast(),
                        offsets: pair_offsets.as_ptr(),
                        count: BLOCK,
                    },
                    dst: pad.next.v16[at..][..ELEMENTS].as_mut_ptr().cast(),
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

/// Where rows become bf16, up to 32 at a time, with zeros up to a multiple of 32 columns.
struct Staging<'a> {
    run: &'a Run<'a>,
    dtype: DType,
    dim: usize,
    staged: &'a mut [u16],
}

impl Staging<'_> {
    /// Calls `pack` with each limb of the rows: bf16 of whole blocks as it lies, all else staged. Returns whether
    /// every row has limbs, and `pack` said so as well.
    fn rows(&mut self, rows: Rows, mut pack: impl FnMut(usize, Rows) -> bool) -> bool {
        let dim = self.dim;
        let (ld, limbs) = (dim.next_multiple_of(SIDE), bf16_split::count(self.dtype));
        if self.dtype == DType::BF16 && dim == ld {
            return pack(0, rows);
        }
        assert!(rows.count <= SIDE && self.staged.len() >= limbs * SIDE * ld);
        let split = Split {
            rows,
            dim,
            limbs,
            dst: self.staged.as_mut_ptr(),
            stride: SIDE * ld,
            ld,
        };
        // SAFETY: the rows lie in the cache or in q; `staged` holds 32 rows of every limb.
        let all = unsafe { self.run.kernels.split[self.dtype as usize](&split) };
        let offsets: [i64; SIDE] = std::array::from_fn(|j| (2 * j * ld) as i64);
        all && (0..limbs).all(|limb| {
            let staged = Rows {
                base: self.staged[limb * SIDE * ld..].as_ptr().cast(),
                offsets: offsets.as_ptr(),
                count: rows.count,
            };
            pack(limb, staged)
        })
    }
}
