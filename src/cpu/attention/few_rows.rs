//! The walk for few query rows (decode, speculative verify). It walks a tile of pages once for all KV heads, and
//! reads keys and values in place. In an NHD cache the heads of a page lie together, so memory is read nearly in
//! order.
#![allow(unsafe_code)]

use super::addresses::Cache;
use super::item::Item;
use super::row_softmax::Scores;
use super::run::Run;
use super::scratch::Scratch;
use super::staged_values::{Values, Weights};
use crate::cpu::kernels::dot::{Dot, PrepareQueries};
use crate::cpu::kernels::prefetch_rows::{PrefetchPolicy, RowPrefetch, RowsWithPrefetch};
use crate::cpu::kernels::product::Product;
use crate::cpu::kernels::table::FewRows;
use std::ops::Range;

/// Some KV heads of an item of at most [`super::shape::FEW_ROWS`] rows.
struct Walk<'a> {
    run: &'a Run<'a>,
    item: &'a Item<'a>,
    heads: Range<usize>,
    kernels: FewRows,
}

/// Computes some KV heads of an item.
pub fn walk(run: &Run<'_>, item: &Item<'_>, heads: Range<usize>, scratch: &mut Scratch<'_>) {
    let kernels = run
        .kernels
        .few(run.row_dtype, item.rows, run.shape.widest());
    let _prepared = kernels.prepare_thread(item.rows);
    let walk = Walk {
        run,
        item,
        heads,
        kernels,
    };
    walk.start(scratch);
    let tile = |start: i64| start..item.keys.end.min(start + run.shape.few_rows_keys as i64);
    let mut keys = tile(item.keys.start);
    run.locate(item, &walk.heads, &keys, &mut scratch.tile);
    let mut policy = PrefetchPolicy::new(run.shape.amx);
    while !keys.is_empty() {
        let next = tile(keys.end);
        run.locate(item, &walk.heads, &next, &mut scratch.next_tile);
        policy.compute(walk.bytes(&keys), |prefetches| {
            let prefetch = if prefetches { next.end - next.start } else { 0 };
            walk.attend(&keys, prefetch as usize, scratch);
        });
        std::mem::swap(&mut scratch.tile, &mut scratch.next_tile);
        keys = next;
    }
    walk.finish(scratch);
}

impl Walk<'_> {
    /// The rows of a head in `q`, `o`, `max` and `sum`.
    fn rows(&self, head: usize) -> Range<usize> {
        head * self.item.rows..(head + 1) * self.item.rows
    }

    /// The rows of a head in `s` and `alpha`, which begin with the first head of the walk.
    fn tile_rows(&self, head: usize) -> Range<usize> {
        self.rows(head - self.heads.start)
    }

    /// Bytes of the keys and values of a tile.
    fn bytes(&self, keys: &Range<i64>) -> usize {
        let shape = self.run.shape;
        let rows = match shape.values_in_keys {
            true => shape.k_row_bytes,
            false => shape.k_row_bytes + shape.v_row_bytes,
        };
        (keys.end - keys.start) as usize * self.heads.len() * rows
    }

    fn all_rows(&self) -> Range<usize> {
        self.heads.start * self.item.rows..self.heads.end * self.item.rows
    }

    fn start(&self, scratch: &mut Scratch<'_>) {
        let (ldq, ldo) = (self.run.shape.ld_qk, self.run.shape.ld_vo);
        for head in self.heads.clone() {
            let rows = self.run.queries(self.item, head, scratch);
            let q = &mut scratch.q[of(self.rows(head), ldq)];
            self.run.load_queries(rows, q);
            let queries = PrepareQueries {
                q: q.as_mut_ptr(),
                ldq,
                rows: self.item.rows,
                dim: self.run.shape.dim_qk,
            };
            // SAFETY: `load_queries` wrote these rows.
            unsafe { (self.kernels.queries)(&queries) };
        }
        let all = self.all_rows();
        scratch.o[of(all.clone(), ldo)].fill(0.0);
        scratch.max[all.clone()].fill(f32::NEG_INFINITY);
        scratch.sum[all].fill(0.0);
    }

    /// A tile of keys; prefetches the first `next` keys of the next tile. Each step is taken for all heads before
    /// the next step: the dependent chains of one head overlap with those of the others.
    fn attend(&self, keys: &Range<i64>, next: usize, scratch: &mut Scratch<'_>) {
        let (run, tokens) = (self.run, 0..self.item.tokens);
        let n = (keys.end - keys.start) as usize;
        for head in self.heads.clone() {
            let prefetch = self.prefetch(
                head,
                &run.k.cache,
                run.k.row_bytes,
                &scratch.next_tile.k_offsets[..next],
            );
            self.scores(head, n, &prefetch, scratch);
        }
        let all = self.all_rows();
        let state = Scores {
            s: scratch.s,
            lds: run.shape.few_rows_keys,
            limits: scratch.limits,
            biases: scratch.biases,
            max: &mut scratch.max[all.clone()],
            sum: &mut scratch.sum[all],
            alpha: scratch.alpha,
        };
        let heads = self.heads.clone();
        run.softmax(self.item, heads, &tokens, keys, state);
        // A bias may hide keys as masks do.
        let whole = run.bias(self.item, keys).is_none() && self.item.sees_all(&tokens, keys);
        for head in self.heads.clone() {
            let prefetch = self.prefetch(
                head,
                &run.v,
                run.shape.v_row_bytes,
                &scratch.next_tile.v_offsets[..next],
            );
            if whole {
                self.accumulate(head, n, &prefetch, scratch);
            } else {
                // SAFETY: the offsets are the next tile's.
                unsafe { prefetch.prefetch_rows(n) };
                self.accumulate_visible(head, n, scratch);
            }
        }
    }

    /// What to prefetch while a head is computed: a share of the rows at `next`, in the order in which they lie in
    /// memory. Where the heads of a token are contiguous, the share is some tokens with all their heads.
    fn prefetch(&self, head: usize, cache: &Cache, bytes: usize, next: &[i64]) -> RowPrefetch {
        if cache.head != bytes as i64 {
            return RowPrefetch::new(cache.rows(head, next), bytes);
        }
        let (index, count) = (head - self.heads.start, self.heads.len());
        let share = index * next.len() / count..(index + 1) * next.len() / count;
        RowPrefetch::new(cache.rows(self.heads.start, &next[share]), count * bytes)
    }

    /// `s = q · kᵀ`.
    fn scores(&self, head: usize, n: usize, prefetch: &RowPrefetch, scratch: &mut Scratch<'_>) {
        let shape = self.run.shape;
        let q = &scratch.q[of(self.rows(head), shape.ld_qk)];
        let s = &mut scratch.s[of(self.tile_rows(head), shape.few_rows_keys)];
        let step = self.run.k.at_a_time(shape.few_rows_keys);
        for first in (0..n).step_by(step) {
            let keys = first..n.min(first + step);
            let rows = self
                .run
                .k
                .whole(head, &scratch.tile, keys, &mut scratch.joined);
            let dot = Dot {
                q: q.as_ptr(),
                ldq: shape.ld_qk,
                rows: self.item.rows,
                k: RowsWithPrefetch { rows, prefetch },
                dim: shape.dim_qk,
                s: s[first..].as_mut_ptr(),
                lds: shape.few_rows_keys,
            };
            // SAFETY: the keys were located within the cache; q and s have room for the rows.
            unsafe { (self.kernels.dot)(&dot) };
        }
    }

    /// `o = alpha · o + p · v`.
    fn accumulate(&self, head: usize, n: usize, prefetch: &RowPrefetch, scratch: &mut Scratch<'_>) {
        let shape = self.run.shape;
        let p = &scratch.s[of(self.tile_rows(head), shape.few_rows_keys)];
        let o = &mut scratch.o[of(self.rows(head), shape.ld_vo)];
        let product = Product {
            a: p.as_ptr(),
            lda: shape.few_rows_keys,
            rows: self.item.rows,
            depth: n,
            b: RowsWithPrefetch {
                rows: self.run.v.rows(head, &scratch.tile.v_offsets[..n]),
                prefetch,
            },
            columns: shape.dim_vo,
            c: o.as_mut_ptr(),
            ldc: shape.ld_vo,
            alpha: scratch.alpha[self.tile_rows(head)].as_ptr(),
        };
        // SAFETY: the values were located within the cache; s and o have room for the rows.
        unsafe { (self.kernels.weighted_sum)(&product) };
    }

    /// `o = alpha · o + p · v` where some rows do not see all keys. Values of masked keys may be infinite or NaN, so
    /// they are staged and multiplied as `Values` does.
    fn accumulate_visible(&self, head: usize, n: usize, scratch: &mut Scratch<'_>) {
        let shape = self.run.shape;
        let rows = self.run.v.rows(head, &scratch.tile.v_offsets[..n]);
        let values = Values::stage(self.run, rows, shape.few_rows_keys, scratch.values);
        let p = Weights {
            p: &scratch.s[of(self.tile_rows(head), shape.few_rows_keys)],
            ldp: shape.few_rows_keys,
            rows: self.item.rows,
        };
        let o = &mut scratch.o[of(self.rows(head), shape.ld_vo)];
        let alpha = &scratch.alpha[self.tile_rows(head)];
        values.accumulate(self.run, p, 0..n, o, Some(alpha));
    }

    fn finish(&self, scratch: &mut Scratch<'_>) {
        for head in self.heads.clone() {
            let rows = self.rows(head);
            let o = &scratch.o[of(rows.clone(), self.run.shape.ld_vo)];
            let (max, sum) = (&scratch.max[rows.clone()], &scratch.sum[rows]);
            self.run
                .store_rows(self.item, head, 0..self.item.rows, o, max, sum);
        }
    }
}

/// The elements of some rows, `ld` per row.
fn of(rows: Range<usize>, ld: usize) -> Range<usize> {
    rows.start * ld..rows.end * ld
}
