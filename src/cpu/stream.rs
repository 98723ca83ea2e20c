//! The walk for few query rows (decode, speculative verify): a tile of pages is walked once for all its
//! heads, with keys and values read in place.
//!
//! In an NHD cache the heads of a page lie together, so this reads memory nearly in order.
#![allow(unsafe_code)]

use super::panel::{Values, Weights};
use super::prefetch::Ahead;
use super::product::Product;
use super::rows::{Dot, Queries, Streamed};
use super::run::{Cache, Item, Run, Scores};
use super::scratch::{Pad, Tile};
use std::ops::Range;

/// Computes some KV heads of an item of at most [`super::shape::STREAM_ROWS`] rows.
pub fn walk(run: &Run<'_>, item: &Item<'_>, heads: Range<usize>, pad: &mut Pad<'_>) {
    let rows = item.rows;
    let _tiles = run.kernels.tiles(run.kv_dtype, rows);
    for head in heads.clone() {
        let q = &mut pad.q[head * rows * run.shape.ld_qk..];
        run.load_queries(item, head, q, pad.q_offsets);
        let queries = Queries {
            q: q.as_mut_ptr(),
            ldq: run.shape.ld_qk,
            rows,
            dim: run.shape.dim_qk,
        };
        // SAFETY: `load_queries` wrote these rows.
        unsafe { run.kernels.queries[run.kv_dtype as usize](&queries) };
    }
    let all = heads.start * rows..heads.end * rows;
    pad.o[all.start * run.shape.ld_vo..all.end * run.shape.ld_vo].fill(0.0);
    pad.max[all.clone()].fill(f32::NEG_INFINITY);
    pad.sum[all].fill(0.0);
    let tile = |start: i64| start..item.keys.end.min(start + run.shape.stream_keys as i64);
    let mut keys = tile(item.keys.start);
    run.locate(item.request, keys.clone(), pad.here.k, pad.here.v);
    while !keys.is_empty() {
        let next = tile(keys.end);
        run.locate(item.request, next.clone(), pad.next.k, pad.next.v);
        attend(
            run,
            item,
            &heads,
            &keys,
            (next.end - next.start) as usize,
            pad,
        );
        std::mem::swap(&mut pad.here, &mut pad.next);
        keys = next;
    }
    for head in heads {
        let state = head * rows..(head + 1) * rows;
        let o = &pad.o[head * rows * run.shape.ld_vo..];
        run.finish(
            item,
            head,
            0..rows,
            o,
            &pad.max[state.clone()],
            &pad.sum[state],
        );
    }
}

/// What to ask for while one of `heads` is computed: a share of the next tile, keys and values, in the order
/// in which it lies in memory. Where a token's heads lie together, the share is some tokens with all `heads`.
fn ahead(
    run: &Run<'_>,
    heads: &Range<usize>,
    head: usize,
    n: usize,
    next: &Tile<'_>,
) -> [Ahead; 2] {
    let (index, count) = (head - heads.start, heads.len());
    let share = index * n / count..(index + 1) * n / count;
    let size = run.kv_dtype.size();
    let of = |cache: &Cache, offsets: &[i64], dim: usize| {
        if cache.head == (dim * size) as i64 {
            let rows = cache.rows(heads.start, &offsets[share.clone()]);
            Ahead::new(rows, count * dim * size)
        } else {
            Ahead::new(cache.rows(head, offsets), dim * size)
        }
    };
    [
        of(&run.k, &next.k[..n], run.shape.dim_qk),
        of(&run.v, &next.v[..n], run.shape.dim_vo),
    ]
}

/// A tile of keys, of which `next` follow in the next one. Each step is taken for all heads: what one head
/// waits for, the chain of its products or of its softmax, overlaps with the others.
fn attend(
    run: &Run<'_>,
    item: &Item<'_>,
    heads: &Range<usize>,
    keys: &Range<i64>,
    next: usize,
    pad: &mut Pad<'_>,
) {
    let n = (keys.end - keys.start) as usize;
    for head in heads.clone() {
        let [ahead, _] = ahead(run, heads, head, next, &pad.next);
        scores(run, item, head, head - heads.start, n, &ahead, pad);
    }
    let rows = heads.start * item.rows..heads.end * item.rows;
    let state = Scores {
        s: pad.s,
        lds: run.shape.stream_keys,
        limits: pad.limits,
        max: &mut pad.max[rows.clone()],
        sum: &mut pad.sum[rows],
        alpha: pad.alpha,
    };
    run.softmax(item, heads.clone(), &(0..item.tokens), keys, state);
    let whole = run.sees_all(item, &(0..item.tokens), keys);
    for head in heads.clone() {
        let [_, ahead] = ahead(run, heads, head, next, &pad.next);
        accumulate(run, item, head, head - heads.start, n, whole, &ahead, pad);
    }
}

/// `s = q · kᵀ` for a head, the walk's `index`-th.
fn scores(
    run: &Run<'_>,
    item: &Item<'_>,
    head: usize,
    index: usize,
    n: usize,
    ahead: &Ahead,
    pad: &mut Pad<'_>,
) {
    let (ldq, lds) = (run.shape.ld_qk, run.shape.stream_keys);
    let q = &pad.q[head * item.rows * ldq..][..item.rows * ldq];
    let s = &mut pad.s[index * item.rows * lds..][..item.rows * lds];
    let dot = Dot {
        q: q.as_ptr(),
        ldq,
        rows: item.rows,
        k: Streamed {
            rows: run.k.rows(head, &pad.here.k[..n]),
            ahead,
        },
        dim: run.shape.dim_qk,
        s: s.as_mut_ptr(),
        lds,
    };
    // SAFETY: the keys were located within the cache; q and s have room for the rows.
    unsafe { run.kernels.dot[run.kv_dtype as usize](&dot) };
}

/// `o = alpha · o + p · v` for a head, the walk's `index`-th.
#[expect(
    clippy::too_many_arguments,
    reason = "a place in nested walks, and what each has at hand"
)]
fn accumulate(
    run: &Run<'_>,
    item: &Item<'_>,
    head: usize,
    index: usize,
    n: usize,
    whole: bool,
    ahead: &Ahead,
    pad: &mut Pad<'_>,
) {
    let (ld, lds) = (run.shape.ld_vo, run.shape.stream_keys);
    let o = &mut pad.o[head * item.rows * ld..][..item.rows * ld];
    let p = &pad.s[index * item.rows * lds..][..item.rows * lds];
    let alpha = &pad.alpha[index * item.rows..][..item.rows];
    if !whole {
        // Keys that some rows do not see may hold anything; the panel's product knows how.
        // SAFETY: the offsets are the next tile's.
        unsafe { ahead.ask_rows(n) };
        let values = Values::stage(run, head, &pad.here.v[..n], pad.v);
        let p = Weights {
            p,
            ldp: lds,
            rows: item.rows,
        };
        values.accumulate(run, p, 0..n, o, alpha);
        return;
    }
    let product = Product {
        a: p.as_ptr(),
        lda: lds,
        rows: item.rows,
        depth: n,
        b: Streamed {
            rows: run.v.rows(head, &pad.here.v[..n]),
            ahead,
        },
        columns: run.shape.dim_vo,
        c: o.as_mut_ptr(),
        ldc: ld,
        alpha: alpha.as_ptr(),
    };
    // SAFETY: the values were located within the cache; s and o have room for the rows.
    unsafe { run.kernels.weigh[run.kv_dtype as usize](&product) };
}
