//! The walk for many query rows (prefill): head by head, with keys and values of a tile staged once as
//! f32 panels for all rows of the item.
#![allow(unsafe_code)]

use super::item::Item;
use super::next_tile::Coming;
use super::row_softmax::Scores;
use super::run::Run;
use super::scratch::Pad;
use super::shape::{KEY_TILE, SCORE_LD};
use super::staged_values::{Values, Weights, stage_values};
use crate::cpu::kernels::convert::Stage;
use crate::cpu::kernels::prefetch_rows::{Ahead, Due};
use crate::cpu::kernels::product::{Asking, Panel, Product};
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::softmax::is_fresh;
use crate::cpu::kernels::transpose::{BLOCK, Transpose};
use crate::dtype::DType;
use std::ops::Range;

/// Scores that one product computes, so that what is due is asked for in turns: 12 rows of a strip of 64 keys.
const PRODUCT_SCORES: usize = 12 * 64;

/// A head of an item.
struct Walk<'a> {
    run: &'a Run<'a>,
    item: &'a Item<'a>,
    head: usize,
    queries: Rows,
    /// Those after the first block. They are read in the first tile, and the rows of o asked for in the last.
    queries_ahead: Ahead,
    outputs_ahead: Ahead,
}

/// Some tokens against the part of a tile that some of them see.
struct Block<'a> {
    tokens: Range<usize>,
    rows: Range<usize>,
    tile: &'a Range<i64>,
    seen: Range<usize>,
}

/// Computes a head of an item.
pub fn walk(run: &Run<'_>, item: &Item<'_>, head: usize, pad: &mut Pad<'_>) {
    let queries = run.queries(item, head, pad.q_offsets);
    let walk = Walk {
        queries_ahead: run.queries_ahead(queries.skip(run.shape.block_rows())),
        outputs_ahead: run.outputs_ahead(item, head, pad.o_offsets),
        run,
        item,
        head,
        queries,
    };
    pad.max[..item.rows].fill(f32::NEG_INFINITY);
    pad.sum[..item.rows].fill(0.0);
    let mut coming = walk.tile_from(item.keys.start, pad);
    let mut finite = walk.stage_rest(&mut coming, pad);
    while !coming.keys.is_empty() {
        std::mem::swap(&mut pad.here, &mut pad.next);
        let keys = coming.keys;
        coming = walk.tile_from(keys.end, pad);
        finite = walk.attend(&keys, finite, &mut coming, pad);
    }
    walk.finish(pad);
}

impl Walk<'_> {
    fn tile_from(&self, start: i64, pad: &mut Pad<'_>) -> Coming {
        let sizes = (KEY_TILE, BLOCK);
        Coming::locate(self.run, self.item, self.head, start, sizes, &mut pad.next)
    }

    /// A tile; stages the next one meanwhile. `finite`: all values of the tile are. Returns the same of the next.
    fn attend(
        &self,
        tile: &Range<i64>,
        finite: bool,
        coming: &mut Coming,
        pad: &mut Pad<'_>,
    ) -> bool {
        let (run, item) = (self.run, self.item);
        let is_first = tile.start == item.keys.start;
        let is_last = tile.end == item.keys.end;
        let mut next_finite = true;
        let blocks = self.blocks();
        for index in 0..blocks {
            let (tokens, rows) = self.block_of(index);
            if is_first {
                let q = &mut pad.q[rows.start * run.shape.ld_qk..];
                run.load_queries(self.queries.part(rows.clone()), q);
            }
            let asked = coming.asked();
            next_finite &= self.stage(asked, pad);
            let left = blocks - index;
            let due = [
                Due::share(&coming.k, left),
                Due::share(&coming.v, left),
                Due::rows(&self.queries_ahead, run.shape.block_rows()).when(is_first),
                Due::share(&self.outputs_ahead, left).when(is_last),
            ];
            if let Some(seen) = item.seen(&tokens, tile, BLOCK) {
                let block = Block {
                    tokens,
                    rows,
                    tile,
                    seen,
                };
                self.block(&block, finite, &due, pad);
            }
        }
        next_finite & self.stage_rest(coming, pad)
    }

    fn blocks(&self) -> usize {
        self.item.tokens.div_ceil(self.run.shape.block_tokens)
    }

    /// Tokens and rows of a block.
    fn block_of(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let (count, group) = (self.run.shape.block_tokens, self.run.shape.group);
        let start = index * count;
        let tokens = start..self.item.tokens.min(start + count);
        let rows = tokens.start * group..tokens.end * group;
        (tokens, rows)
    }

    fn block(&self, block: &Block<'_>, finite: bool, due: &[Due<'_>], pad: &mut Pad<'_>) {
        let run = self.run;
        let Block { rows, seen, .. } = block;
        self.scores(block, due, pad);
        let fresh = is_fresh(&pad.max[rows.clone()]);
        let start = block.tile.start;
        let keys = start + seen.start as i64..start + seen.end as i64;
        let state = Scores {
            s: pad.s,
            lds: SCORE_LD,
            limits: pad.limits,
            max: &mut pad.max[rows.start..],
            sum: &mut pad.sum[rows.start..],
            alpha: pad.alpha,
        };
        run.softmax(
            self.item,
            self.head..self.head + 1,
            &block.tokens,
            &keys,
            state,
        );
        let values = Values {
            panel: pad.here.v.as_ptr(),
            finite,
        };
        let p = Weights {
            p: pad.s,
            ldp: SCORE_LD,
            rows: rows.len(),
        };
        let o = &mut pad.o[rows.start * run.shape.ld_vo..rows.end * run.shape.ld_vo];
        let alpha = (!fresh).then_some(&*pad.alpha);
        values.accumulate(run, p, seen.clone(), o, alpha);
    }

    /// `s = q · kᵀ` for a block. Meanwhile, what is due is asked for: each product asks for some of one kind.
    fn scores(&self, block: &Block<'_>, due: &[Due<'_>], pad: &mut Pad<'_>) {
        let Block { rows, seen, .. } = block;
        let (ld, strip) = (self.run.shape.ld_qk, self.run.kernels.strip);
        let product_rows = PRODUCT_SCORES / strip;
        let products = rows.len().div_ceil(product_rows) * seen.len().div_ceil(strip);
        let wanted = due.iter().filter(|due| due.lines > 0);
        let turns = (products / wanted.clone().count().max(1)).max(1);
        let mut wanted = wanted.cycle();
        assert!(pad.s.len() >= rows.len() * SCORE_LD && pad.q.len() >= rows.end * ld);
        let mut column = seen.start;
        while column < seen.end {
            let inside = column % strip;
            let columns = (strip - inside).min((seen.end - column).next_multiple_of(BLOCK));
            let keys = Panel {
                base: pad.here.k[column / strip * strip * ld + inside..].as_ptr(),
                ld: strip,
            };
            for first in (0..rows.len()).step_by(product_rows) {
                let due = wanted.next().unwrap_or(&due[0]);
                let product = Product {
                    a: pad.q[(rows.start + first) * ld..].as_ptr(),
                    lda: ld,
                    rows: product_rows.min(rows.len() - first),
                    depth: self.run.shape.dim_qk,
                    b: Asking {
                        panel: keys,
                        ahead: due.ahead,
                        lines: due.lines.div_ceil(turns),
                    },
                    columns,
                    c: pad.s[first * SCORE_LD + column - seen.start..].as_mut_ptr(),
                    ldc: SCORE_LD,
                    alpha: std::ptr::null(),
                };
                // SAFETY: the panel holds `ld` rows of every strip up to the tile's end; q and s were checked.
                unsafe { (self.run.kernels.asking_product)(&product) };
            }
            column += columns;
        }
    }

    /// Stages rows of the next tile, whole blocks but for its last. Returns whether the values are finite.
    fn stage(&self, range: Range<usize>, pad: &mut Pad<'_>) -> bool {
        let (run, next) = (self.run, &mut pad.next);
        let keys = run.k.rows(self.head, &next.k_offsets[range.clone()]);
        for first in (0..keys.count).step_by(BLOCK) {
            let keys = keys.part(first..first + BLOCK);
            stage_keys(run, keys, range.start + first, next.k, pad.staged);
        }
        let values = run.v.rows(self.head, &next.v_offsets[range.clone()]);
        stage_values(run, values, range.start, next.v)
    }

    /// The same for all that are left.
    fn stage_rest(&self, coming: &mut Coming, pad: &mut Pad<'_>) -> bool {
        let mut finite = true;
        while let Some(range) = coming.next() {
            finite &= self.stage(range, pad);
        }
        finite
    }

    fn finish(&self, pad: &mut Pad<'_>) {
        let item = self.item;
        let ld = self.run.shape.ld_vo;
        for index in 0..self.blocks() {
            let (_, rows) = self.block_of(index);
            if is_fresh(&pad.max[rows.clone()]) {
                pad.o[rows.start * ld..rows.end * ld].fill(0.0);
            }
        }
        let (max, sum) = (&pad.max[..item.rows], &pad.sum[..item.rows]);
        self.run
            .finish(item, self.head, 0..item.rows, pad.o, max, sum);
    }
}

/// Up to 16 keys, rows, to columns of a panel's strip, from column `first` on, a multiple of 16: element `d` of
/// key `j` lands at `panel[(j / strip · ld_qk + d) · strip + j % strip]`. Columns past the last key hold anything.
fn stage_keys(run: &Run<'_>, mut rows: Rows, first: usize, panel: &mut [f32], staged: &mut [f32]) {
    let (ld, strip) = (run.shape.ld_qk, run.kernels.strip);
    let staged_offsets: [i64; BLOCK] = std::array::from_fn(|j| (4 * j * ld) as i64);
    if run.kv_dtype != DType::F32 || run.shape.dim_qk < ld {
        let stage = Stage {
            rows,
            dim: run.shape.dim_qk,
            dst: staged.as_mut_ptr(),
            width: ld,
            strip: 0,
        };
        // SAFETY: the keys were located within the cache; `staged` holds 16 rows.
        unsafe { run.kernels.stage[run.kv_dtype as usize](&stage) };
        rows.base = staged.as_ptr().cast();
        rows.offsets = staged_offsets.as_ptr();
    }
    let dst = &mut panel[first / strip * strip * ld + first % strip..];
    let transpose = Transpose {
        rows,
        dst: dst.as_mut_ptr(),
        ld: strip,
        columns: ld,
    };
    // SAFETY: as above; the panel holds all strips of a tile.
    unsafe { (run.kernels.transpose)(&transpose) };
}
