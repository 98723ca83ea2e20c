//! The walk for many query rows (prefill), in f32 on any instruction set. It computes one KV head of an item. Keys
//! and values of a tile are staged once, as f32 panels, for all rows of the item.
#![allow(unsafe_code)]

use super::item::Item;
use super::next_tile::NextTile;
use super::row_softmax::Scores;
use super::run::Run;
use super::scratch::Scratch;
use super::shape::SCORE_LD;
use super::staged_values::{Values, Weights, stage_values};
use crate::cpu::kernels::convert::Stage;
use crate::cpu::kernels::prefetch_rows::{PrefetchShare, RowPrefetch};
use crate::cpu::kernels::product::{Panel, PanelWithPrefetch, Product};
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::softmax::saw_no_key;
use crate::cpu::kernels::transpose::{BLOCK, Transpose};
use crate::dtype::DType;
use std::ops::Range;

/// Scores that one product computes: 12 rows by a strip of 64 keys. Products are this small so that each prefetches
/// lines of one kind in turn.
const PRODUCT_SCORES: usize = 12 * 64;

/// A head of an item.
struct Walk<'a> {
    run: &'a Run<'a>,
    item: &'a Item<'a>,
    head: usize,
    queries: Rows,
    /// The query rows after the first block, which the first tile reads. The rows of o, which the last tile is
    /// followed by.
    prefetch_queries: RowPrefetch,
    prefetch_outputs: RowPrefetch,
}

/// Some tokens against the part of a tile that some of them see.
struct Block<'a> {
    tokens: Range<usize>,
    rows: Range<usize>,
    tile: &'a Range<i64>,
    visible: Range<usize>,
}

/// Computes a head of an item.
pub fn walk(run: &Run<'_>, item: &Item<'_>, head: usize, scratch: &mut Scratch<'_>) {
    let queries = run.queries(item, head, scratch);
    let walk = Walk {
        prefetch_queries: run.prefetch_queries(queries.skip(run.shape.block_rows())),
        prefetch_outputs: run.prefetch_outputs(item, head, scratch.o_offsets),
        run,
        item,
        head,
        queries,
    };
    scratch.max[..item.rows].fill(f32::NEG_INFINITY);
    scratch.sum[..item.rows].fill(0.0);
    let mut next_tile = walk.tile_from(item.keys.start, scratch);
    let mut finite = walk.stage_rest(&mut next_tile, scratch);
    while !next_tile.keys.is_empty() {
        std::mem::swap(&mut scratch.tile, &mut scratch.next_tile);
        let keys = next_tile.keys;
        next_tile = walk.tile_from(keys.end, scratch);
        finite = walk.attend(&keys, finite, &mut next_tile, scratch);
    }
    walk.finish(scratch);
}

impl Walk<'_> {
    fn tile_from(&self, start: i64, scratch: &mut Scratch<'_>) -> NextTile {
        let sizes = (self.run.shape.key_tile, BLOCK);
        NextTile::locate(
            self.run,
            self.item,
            self.head,
            start,
            sizes,
            &mut scratch.next_tile,
        )
    }

    /// A tile of keys; stages the next one meanwhile. `finite` says that all values of the tile are finite. Returns
    /// the same of the next tile.
    fn attend(
        &self,
        tile: &Range<i64>,
        finite: bool,
        next_tile: &mut NextTile,
        scratch: &mut Scratch<'_>,
    ) -> bool {
        let (run, item) = (self.run, self.item);
        let is_first = tile.start == item.keys.start;
        let is_last = tile.end == item.keys.end;
        let mut next_finite = true;
        let blocks = self.blocks();
        for index in 0..blocks {
            let (tokens, rows) = self.block_of(index);
            if is_first {
                let q = &mut scratch.q[rows.start * run.shape.ld_qk..];
                run.load_queries(self.queries.part(rows.clone()), q);
            }
            let prefetched = next_tile.take_prefetched();
            next_finite &= self.stage(prefetched, scratch);
            let left = blocks - index;
            let prefetches = [
                PrefetchShare::share(&next_tile.k, left),
                PrefetchShare::share(&next_tile.v, left),
                PrefetchShare::rows(&self.prefetch_queries, run.shape.block_rows()).when(is_first),
                PrefetchShare::share(&self.prefetch_outputs, left).when(is_last),
            ];
            if let Some(visible) = item.visible_to_any(&tokens, tile, BLOCK) {
                let block = Block {
                    tokens,
                    rows,
                    tile,
                    visible,
                };
                self.block(&block, finite, &prefetches, scratch);
            }
        }
        next_finite & self.stage_rest(next_tile, scratch)
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

    fn block(
        &self,
        block: &Block<'_>,
        finite: bool,
        prefetches: &[PrefetchShare<'_>],
        scratch: &mut Scratch<'_>,
    ) {
        let run = self.run;
        let Block { rows, visible, .. } = block;
        self.scores(block, prefetches, scratch);
        let overwrite = saw_no_key(&scratch.max[rows.clone()]);
        let start = block.tile.start;
        let keys = start + visible.start as i64..start + visible.end as i64;
        let state = Scores {
            s: scratch.s,
            lds: SCORE_LD,
            limits: scratch.limits,
            biases: scratch.biases,
            max: &mut scratch.max[rows.start..],
            sum: &mut scratch.sum[rows.start..],
            alpha: scratch.alpha,
        };
        run.softmax(
            self.item,
            self.head..self.head + 1,
            &block.tokens,
            &keys,
            state,
        );
        let values = Values {
            panel: scratch.tile.v.as_ptr(),
            tile: run.shape.key_tile,
            finite,
        };
        let p = Weights {
            p: scratch.s,
            ldp: SCORE_LD,
            rows: rows.len(),
        };
        let o = &mut scratch.o[rows.start * run.shape.ld_vo..rows.end * run.shape.ld_vo];
        let alpha = (!overwrite).then_some(&*scratch.alpha);
        values.accumulate(run, p, visible.clone(), o, alpha);
    }

    /// `s = q · kᵀ` for a block. Each product prefetches lines of one of the wanted kinds, in turn.
    fn scores(
        &self,
        block: &Block<'_>,
        prefetches: &[PrefetchShare<'_>],
        scratch: &mut Scratch<'_>,
    ) {
        let Block { rows, visible, .. } = block;
        let (ld, strip) = (self.run.shape.ld_qk, self.run.kernels.strip);
        let product_rows = PRODUCT_SCORES / strip;
        let products = rows.len().div_ceil(product_rows) * visible.len().div_ceil(strip);
        let wanted = prefetches.iter().filter(|prefetches| prefetches.lines > 0);
        let turns = (products / wanted.clone().count().max(1)).max(1);
        let mut wanted = wanted.cycle();
        assert!(scratch.s.len() >= rows.len() * SCORE_LD && scratch.q.len() >= rows.end * ld);
        let mut column = visible.start;
        while column < visible.end {
            let inside = column % strip;
            let columns = (strip - inside).min((visible.end - column).next_multiple_of(BLOCK));
            let keys = Panel {
                base: scratch.tile.k[column / strip * strip * ld + inside..].as_ptr(),
                ld: strip,
            };
            for first in (0..rows.len()).step_by(product_rows) {
                let prefetches = wanted.next().unwrap_or(&prefetches[0]);
                let product = Product {
                    a: scratch.q[(rows.start + first) * ld..].as_ptr(),
                    lda: ld,
                    rows: product_rows.min(rows.len() - first),
                    depth: self.run.shape.dim_qk,
                    b: PanelWithPrefetch {
                        panel: keys,
                        prefetch: prefetches.prefetch,
                        lines: prefetches.lines.div_ceil(turns),
                    },
                    columns,
                    c: scratch.s[first * SCORE_LD + column - visible.start..].as_mut_ptr(),
                    ldc: SCORE_LD,
                    alpha: std::ptr::null(),
                };
                // SAFETY: the panel holds `ld` rows of every strip up to the tile's end; q and s were checked.
                unsafe { (self.run.kernels.product_with_prefetch)(&product) };
            }
            column += columns;
        }
    }

    /// Stages rows of the next tile, in whole blocks but for the last one. Returns whether the values are finite.
    fn stage(&self, range: Range<usize>, scratch: &mut Scratch<'_>) -> bool {
        let (run, next) = (self.run, &mut scratch.next_tile);
        for first in range.clone().step_by(BLOCK) {
            let keys = first..range.end.min(first + BLOCK);
            let keys = run.k.whole(self.head, next, keys, &mut scratch.joined);
            stage_keys(run, keys, first, next.k, scratch.staged);
        }
        let values = run.v.rows(self.head, &next.v_offsets[range.clone()]);
        stage_values(run, values, (range.start, run.shape.key_tile), next.v)
    }

    /// Stages the rows that are left.
    fn stage_rest(&self, next_tile: &mut NextTile, scratch: &mut Scratch<'_>) -> bool {
        let mut finite = true;
        while let Some(range) = next_tile.take_next() {
            finite &= self.stage(range, scratch);
        }
        finite
    }

    fn finish(&self, scratch: &mut Scratch<'_>) {
        let item = self.item;
        let ld = self.run.shape.ld_vo;
        for index in 0..self.blocks() {
            let (_, rows) = self.block_of(index);
            if saw_no_key(&scratch.max[rows.clone()]) {
                scratch.o[rows.start * ld..rows.end * ld].fill(0.0);
            }
        }
        let (max, sum) = (&scratch.max[..item.rows], &scratch.sum[..item.rows]);
        self.run
            .store_rows(item, self.head, 0..item.rows, scratch.o, max, sum);
    }
}

/// Transposes up to 16 keys into columns of a panel's strip, from column `first` on, a multiple of 16. Element `d`
/// of key `j` lands at `panel[(j / strip · ld_qk + d) · strip + j % strip]`. Columns past the last key hold
/// anything.
fn stage_keys(run: &Run<'_>, mut rows: Rows, first: usize, panel: &mut [f32], staged: &mut [f32]) {
    let (ld, strip) = (run.shape.ld_qk, run.kernels.strip);
    let staged_offsets: [i64; BLOCK] = std::array::from_fn(|j| (4 * j * ld) as i64);
    if run.row_dtype != DType::F32 || run.shape.dim_qk < ld {
        let stage = Stage {
            rows,
            dim: run.shape.dim_qk,
            dst: staged.as_mut_ptr(),
            width: ld,
            strip: 0,
        };
        // SAFETY: the keys were located within the cache; `staged` holds 16 rows.
        unsafe { run.kernels.stage[run.row_dtype as usize](&stage) };
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
