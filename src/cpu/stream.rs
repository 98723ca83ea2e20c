//! The walk for few query rows (decode, speculative verify): a tile of pages is walked once for all its
//! heads, with keys and values read in place.
//!
//! In an NHD cache the heads of a page lie together, so this reads memory nearly in order.
#![allow(unsafe_code)]

use super::panel::Values;
use super::prefetch::Ahead;
use super::product::Product;
use super::rows::{Dot, Queries, Streamed};
use super::run::{Cache, Item, Run, Scores};
use super::scratch::{Pad, Tile};
use super::shape::{KEY_TILE, SCORE_LD};
use std::ops::Range;

/// Bytes of keys and values that a tile aims at: what is asked for ahead is to be a small part of the
/// second-level cache. With twice as many, cold bf16 decode was 10 to 20 % slower.
const TILE_BYTES: usize = 128 << 10;

/// Fewest keys of a tile; its length is a multiple of them.
const TILE_UNIT: usize = 32;

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
    let tile_keys = tile_keys(run);
    let tile = |start: i64| start..item.keys.end.min(start + tile_keys);
    let mut keys = tile(item.keys.start);
    run.locate(item.request, keys.clone(), pad.here.k, pad.here.v);
    while !keys.is_empty() {
        let next = tile(keys.end);
        run.locate(item.request, next.clone(), pad.next.k, pad.next.v);
        let whole = run.sees_all(item, &(0..item.tokens), &keys);
        for head in heads.clone() {
            let [k, v] = ahead(
                run,
                &heads,
                head,
                (next.end - next.start) as usize,
                &pad.next,
            );
            scores(run, item, head, &keys, &k, pad);
            weigh(run, item, head, &keys, pad);
            accumulate(run, item, head, &keys, whole, &v, pad);
        }
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

/// Keys per tile: the same whichever heads are walked, so that they do not change the result.
fn tile_keys(run: &Run<'_>) -> i64 {
    let shape = run.shape;
    let bytes = shape.num_kv_heads * (shape.dim_qk + shape.dim_vo) * run.kv_dtype.size();
    ((TILE_BYTES / bytes).clamp(TILE_UNIT, KEY_TILE) / TILE_UNIT * TILE_UNIT) as i64
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

fn scores(
    run: &Run<'_>,
    item: &Item<'_>,
    head: usize,
    keys: &Range<i64>,
    ahead: &Ahead,
    pad: &mut Pad<'_>,
) {
    let n = (keys.end - keys.start) as usize;
    let q = &pad.q[head * item.rows * run.shape.ld_qk..][..item.rows * run.shape.ld_qk];
    assert!(pad.s.len() >= item.rows * SCORE_LD);
    let dot = Dot {
        q: q.as_ptr(),
        ldq: run.shape.ld_qk,
        rows: item.rows,
        k: Streamed {
            rows: run.k.rows(head, &pad.here.k[..n]),
            ahead,
        },
        dim: run.shape.dim_qk,
        s: pad.s.as_mut_ptr(),
        lds: SCORE_LD,
    };
    // SAFETY: the keys were located within the cache; q and s have room for the rows.
    unsafe { run.kernels.dot[run.kv_dtype as usize](&dot) };
}

fn weigh(run: &Run<'_>, item: &Item<'_>, head: usize, keys: &Range<i64>, pad: &mut Pad<'_>) {
    let rows = head * item.rows..(head + 1) * item.rows;
    let state = Scores {
        s: pad.s,
        limits: pad.limits,
        max: &mut pad.max[rows.clone()],
        sum: &mut pad.sum[rows],
        alpha: pad.alpha,
    };
    run.softmax(item, head, &(0..item.tokens), keys, state);
}

fn accumulate(
    run: &Run<'_>,
    item: &Item<'_>,
    head: usize,
    keys: &Range<i64>,
    whole: bool,
    ahead: &Ahead,
    pad: &mut Pad<'_>,
) {
    let n = (keys.end - keys.start) as usize;
    let ld = run.shape.ld_vo;
    let o = &mut pad.o[head * item.rows * ld..][..item.rows * ld];
    if !whole {
        // Keys that some rows do not see may hold anything; the panel's product knows how.
        // SAFETY: the offsets are the next tile's.
        unsafe { ahead.ask_rows(n) };
        let values = Values::stage(run, head, &pad.here.v[..n], pad.v);
        values.accumulate(run, pad.s, item.rows, 0..n, o, pad.alpha);
        return;
    }
    let product = Product {
        a: pad.s.as_ptr(),
        lda: SCORE_LD,
        rows: item.rows,
        depth: n,
        b: Streamed {
            rows: run.v.rows(head, &pad.here.v[..n]),
            ahead,
        },
        columns: run.shape.dim_vo,
        c: o.as_mut_ptr(),
        ldc: ld,
        alpha: pad.alpha.as_ptr(),
    };
    // SAFETY: the values were located within the cache; s and o have room for the rows.
    unsafe { run.kernels.weigh[run.kv_dtype as usize](&product) };
}
