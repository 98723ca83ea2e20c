//! The walk for few query rows (decode, speculative verify): a tile of pages is walked once for all its
//! heads, with keys and values read in place.
//!
//! In an NHD cache the heads of a page lie together, so this reads memory nearly in order.
#![allow(unsafe_code)]

use super::item::Item;
use super::row_softmax::Scores;
use super::run::{Cache, Run};
use super::scratch::Pad;
use super::staged_values::{Values, Weights};
use crate::cpu::kernels::dot::{Dot, Queries};
use crate::cpu::kernels::prefetch_rows::{Ahead, Need, Streamed};
use crate::cpu::kernels::product::Product;
use crate::cpu::kernels::table::FewRows;
use std::ops::Range;

/// Some KV heads of an item of at most [`super::shape::STREAM_ROWS`] rows.
struct Walk<'a> {
    run: &'a Run<'a>,
    item: &'a Item<'a>,
    heads: Range<usize>,
    kernels: FewRows,
}

/// Computes them.
pub fn walk(run: &Run<'_>, item: &Item<'_>, heads: Range<usize>, pad: &mut Pad<'_>) {
    let kernels = run.kernels.few(run.kv_dtype, item.rows, run.shape.widest());
    let _prepared = kernels.prepare_thread(item.rows);
    let walk = Walk {
        run,
        item,
        heads,
        kernels,
    };
    walk.start(pad);
    let tile = |start: i64| start..item.keys.end.min(start + run.shape.stream_keys as i64);
    let mut keys = tile(item.keys.start);
    run.locate(item, &keys, &mut pad.here);
    let mut need = Need::new(run.shape.amx);
    while !keys.is_empty() {
        let next = tile(keys.end);
        run.locate(item, &next, &mut pad.next);
        need.watch(walk.bytes(&keys), |asks| {
            let ahead = if asks { next.end - next.start } else { 0 };
            walk.attend(&keys, ahead as usize, pad);
        });
        std::mem::swap(&mut pad.here, &mut pad.next);
        keys = next;
    }
    walk.finish(pad);
}

impl Walk<'_> {
    /// The rows of a head in `q`, `o` and the running state.
    fn rows(&self, head: usize) -> Range<usize> {
        head * self.item.rows..(head + 1) * self.item.rows
    }

    /// The rows of a head in the tile's scores and factors, which begin with the walk's first head.
    fn tile_rows(&self, head: usize) -> Range<usize> {
        self.rows(head - self.heads.start)
    }

    /// Bytes of keys and values.
    fn bytes(&self, keys: &Range<i64>) -> usize {
        let dims = self.run.shape.dim_qk + self.run.shape.dim_vo;
        (keys.end - keys.start) as usize * self.heads.len() * dims * self.run.kv_dtype.size()
    }

    fn all_rows(&self) -> Range<usize> {
        self.heads.start * self.item.rows..self.heads.end * self.item.rows
    }

    fn start(&self, pad: &mut Pad<'_>) {
        let (ldq, ldo) = (self.run.shape.ld_qk, self.run.shape.ld_vo);
        for head in self.heads.clone() {
            let q = &mut pad.q[of(self.rows(head), ldq)];
            let rows = self.run.queries(self.item, head, pad.q_offsets);
            self.run.load_queries(rows, q);
            let queries = Queries {
                q: q.as_mut_ptr(),
                ldq,
                rows: self.item.rows,
                dim: self.run.shape.dim_qk,
            };
            // SAFETY: `load_queries` wrote these rows.
            unsafe { (self.kernels.queries)(&queries) };
        }
        let all = self.all_rows();
        pad.o[of(all.clone(), ldo)].fill(0.0);
        pad.max[all.clone()].fill(f32::NEG_INFINITY);
        pad.sum[all].fill(0.0);
    }

    /// A tile of keys; asks for the first `next` of the one after it. Each step is taken for all heads: what one
    /// head waits for, the chain of its products or of its softmax, overlaps with the others.
    fn attend(&self, keys: &Range<i64>, next: usize, pad: &mut Pad<'_>) {
        let (run, tokens) = (self.run, 0..self.item.tokens);
        let n = (keys.end - keys.start) as usize;
        for head in self.heads.clone() {
            let ahead = self.ahead(head, &run.k, run.shape.dim_qk, &pad.next.k_offsets[..next]);
            self.scores(head, n, &ahead, pad);
        }
        let all = self.all_rows();
        let state = Scores {
            s: pad.s,
            lds: run.shape.stream_keys,
            limits: pad.limits,
            max: &mut pad.max[all.clone()],
            sum: &mut pad.sum[all],
            alpha: pad.alpha,
        };
        let heads = self.heads.clone();
        run.softmax(self.item, heads, &tokens, keys, state);
        let whole = self.item.sees_all(&tokens, keys);
        for head in self.heads.clone() {
            let ahead = self.ahead(head, &run.v, run.shape.dim_vo, &pad.next.v_offsets[..next]);
            if whole {
                self.accumulate(head, n, &ahead, pad);
            } else {
                // SAFETY: the offsets are the next tile's.
                unsafe { ahead.ask_rows(n) };
                self.accumulate_seen(head, n, pad);
            }
        }
    }

    /// What to ask for while a head is computed: a share of the rows at `next`, in the order in which they lie
    /// in memory. Where a token's heads lie together, the share is some tokens with all heads.
    fn ahead(&self, head: usize, cache: &Cache, dim: usize, next: &[i64]) -> Ahead {
        let bytes = dim * self.run.kv_dtype.size();
        if cache.head != bytes as i64 {
            return Ahead::new(cache.rows(head, next), bytes);
        }
        let (index, count) = (head - self.heads.start, self.heads.len());
        let share = index * next.len() / count..(index + 1) * next.len() / count;
        Ahead::new(cache.rows(self.heads.start, &next[share]), count * bytes)
    }

    /// `s = q · kᵀ`.
    fn scores(&self, head: usize, n: usize, ahead: &Ahead, pad: &mut Pad<'_>) {
        let shape = self.run.shape;
        let q = &pad.q[of(self.rows(head), shape.ld_qk)];
        let s = &mut pad.s[of(self.tile_rows(head), shape.stream_keys)];
        let dot = Dot {
            q: q.as_ptr(),
            ldq: shape.ld_qk,
            rows: self.item.rows,
            k: Streamed {
                rows: self.run.k.rows(head, &pad.here.k_offsets[..n]),
                ahead,
            },
            dim: shape.dim_qk,
            s: s.as_mut_ptr(),
            lds: shape.stream_keys,
        };
        // SAFETY: the keys were located within the cache; q and s have room for the rows.
        unsafe { (self.kernels.dot)(&dot) };
    }

    /// `o = alpha · o + p · v`.
    fn accumulate(&self, head: usize, n: usize, ahead: &Ahead, pad: &mut Pad<'_>) {
        let shape = self.run.shape;
        let p = &pad.s[of(self.tile_rows(head), shape.stream_keys)];
        let o = &mut pad.o[of(self.rows(head), shape.ld_vo)];
        let product = Product {
            a: p.as_ptr(),
            lda: shape.stream_keys,
            rows: self.item.rows,
            depth: n,
            b: Streamed {
                rows: self.run.v.rows(head, &pad.here.v_offsets[..n]),
                ahead,
            },
            columns: shape.dim_vo,
            c: o.as_mut_ptr(),
            ldc: shape.ld_vo,
            alpha: pad.alpha[self.tile_rows(head)].as_ptr(),
        };
        // SAFETY: the values were located within the cache; s and o have room for the rows.
        unsafe { (self.kernels.weigh)(&product) };
    }

    /// The same where some rows do not see all keys. Those may hold anything; the panel's product knows how.
    fn accumulate_seen(&self, head: usize, n: usize, pad: &mut Pad<'_>) {
        let shape = self.run.shape;
        let rows = self.run.v.rows(head, &pad.here.v_offsets[..n]);
        let values = Values::stage(self.run, rows, pad.here.v);
        let p = Weights {
            p: &pad.s[of(self.tile_rows(head), shape.stream_keys)],
            ldp: shape.stream_keys,
            rows: self.item.rows,
        };
        let o = &mut pad.o[of(self.rows(head), shape.ld_vo)];
        let alpha = &pad.alpha[self.tile_rows(head)];
        values.accumulate(self.run, p, 0..n, o, Some(alpha));
    }

    fn finish(&self, pad: &mut Pad<'_>) {
        for head in self.heads.clone() {
            let rows = self.rows(head);
            let o = &pad.o[of(rows.clone(), self.run.shape.ld_vo)];
            let (max, sum) = (&pad.max[rows.clone()], &pad.sum[rows]);
            self.run
                .finish(self.item, head, 0..self.item.rows, o, max, sum);
        }
    }
}

/// The elements of some rows.
fn of(rows: Range<usize>, ld: usize) -> Range<usize> {
    rows.start * ld..rows.end * ld
}
