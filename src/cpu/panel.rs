//! The walk for many query rows (prefill): head by head, with keys and values of a tile staged once as
//! f32 panels for all rows of the item.
#![allow(unsafe_code)]

use super::prefetch::Ahead;
use super::product::{Panel, Product};
use super::rows::Stage;
use super::run::{Item, Run, Scores};
use super::scratch::Pad;
use super::shape::{KEY_TILE, SCORE_LD};
use super::transpose::{BLOCK, Transpose};
use crate::dtype::DType;
use std::ops::Range;

/// Computes a head of an item.
pub fn walk(run: &Run<'_>, item: &Item<'_>, head: usize, pad: &mut Pad<'_>) {
    run.load_queries(item, head, pad.q, pad.q_offsets);
    pad.o[..item.rows * run.shape.ld_vo].fill(0.0);
    pad.max[..item.rows].fill(f32::NEG_INFINITY);
    pad.sum[..item.rows].fill(0.0);
    let tile = |start: i64| start..item.keys.end.min(start + KEY_TILE as i64);
    let mut keys = tile(item.keys.start);
    run.locate(item.request, keys.clone(), pad.here.k, pad.here.v);
    while !keys.is_empty() {
        let n = (keys.end - keys.start) as usize;
        let next = tile(keys.end);
        run.locate(item.request, next.clone(), pad.next.k, pad.next.v);
        stage_keys(run, head, &pad.here.k[..n], pad.k, pad.staged);
        let values = Values::stage(run, head, &pad.here.v[..n], pad.v);
        let mut ahead = run.ahead(head, (next.end - next.start) as usize, &pad.next);
        if next.is_empty() {
            ahead[0] = run.outputs_ahead(item, head, pad.q_offsets);
        }
        let blocks = item.tokens.div_ceil(run.shape.block_tokens);
        for index in 0..blocks {
            let start = index * run.shape.block_tokens;
            let tokens = start..item.tokens.min(start + run.shape.block_tokens);
            let ahead = (&ahead, blocks - index);
            block(run, item, head, &keys, &tokens, &values, ahead, pad);
        }
        std::mem::swap(&mut pad.here, &mut pad.next);
        keys = next;
    }
    let (max, sum) = (&pad.max[..item.rows], &pad.sum[..item.rows]);
    run.finish(item, head, 0..item.rows, pad.o, max, sum);
}

/// Some tokens against the part of the tile that they see.
#[expect(
    clippy::too_many_arguments,
    reason = "a place in three nested walks, and what each has at hand"
)]
fn block(
    run: &Run<'_>,
    item: &Item<'_>,
    head: usize,
    keys: &Range<i64>,
    tokens: &Range<usize>,
    values: &Values,
    ahead: (&[Ahead; 2], usize),
    pad: &mut Pad<'_>,
) {
    let Some(seen) = item.seen(tokens, keys, BLOCK) else {
        return;
    };
    let group = run.shape.group;
    let rows = tokens.start * group..tokens.end * group;
    scores(run, &rows, &seen, ahead, pad);
    let seen_keys = keys.start + seen.start as i64..keys.start + seen.end as i64;
    let state = Scores {
        s: pad.s,
        lds: SCORE_LD,
        limits: pad.limits,
        max: &mut pad.max[rows.start..],
        sum: &mut pad.sum[rows.start..],
        alpha: pad.alpha,
    };
    run.softmax(item, head..head + 1, tokens, &seen_keys, state);
    let o = &mut pad.o[rows.start * run.shape.ld_vo..rows.end * run.shape.ld_vo];
    let p = Weights {
        p: pad.s,
        ldp: SCORE_LD,
        rows: rows.len(),
    };
    values.accumulate(run, p, seen, o, pad.alpha);
}

/// `s = q · kᵀ` for a block of rows and the keys `seen` of the tile. Before each strip of keys, some of the rows
/// that come next (the next tile's or, after the last, the outputs) are asked for, so that all are when as many
/// blocks as are left have done the same.
fn scores(
    run: &Run<'_>,
    rows: &Range<usize>,
    seen: &Range<usize>,
    (ahead, blocks_left): (&[Ahead; 2], usize),
    pad: &mut Pad<'_>,
) {
    let (ld, strip) = (run.shape.ld_qk, run.kernels.strip);
    let steps = blocks_left * seen.len().div_ceil(strip);
    let shares = ahead.each_ref().map(|ahead| ahead.share_rows(steps));
    assert!(pad.s.len() >= rows.len() * SCORE_LD && pad.q.len() >= rows.end * ld);
    let mut column = seen.start;
    while column < seen.end {
        for (ahead, share) in ahead.iter().zip(shares) {
            // SAFETY: the offsets are the next tile's.
            unsafe { ahead.ask_rows(share) };
        }
        let inside = column % strip;
        let columns = (strip - inside).min((seen.end - column).next_multiple_of(BLOCK));
        let product = Product {
            a: pad.q[rows.start * ld..].as_ptr(),
            lda: ld,
            rows: rows.len(),
            depth: run.shape.dim_qk,
            b: Panel {
                base: pad.k[column / strip * strip * ld + inside..].as_ptr(),
                ld: strip,
            },
            columns,
            c: pad.s[column - seen.start..].as_mut_ptr(),
            ldc: SCORE_LD,
            alpha: std::ptr::null(),
        };
        // SAFETY: the panel holds `ld` rows of every strip up to the tile's end; q and s were checked.
        unsafe { (run.kernels.product)(&product) };
        column += columns;
    }
}

/// Key rows to strips of columns: element `d` of key `j` lands at
/// `panel[(j / strip · ld_qk + d) · strip + j % strip]`. Columns past the last key hold anything.
fn stage_keys(run: &Run<'_>, head: usize, offsets: &[i64], panel: &mut [f32], staged: &mut [f32]) {
    let (ld, strip) = (run.shape.ld_qk, run.kernels.strip);
    let staged_offsets: [i64; BLOCK] = std::array::from_fn(|j| (4 * j * ld) as i64);
    for (index, offsets) in offsets.chunks(BLOCK).enumerate() {
        let column = index * BLOCK;
        let mut rows = run.k.rows(head, offsets);
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
        let dst = &mut panel[column / strip * strip * ld + column % strip..];
        let transpose = Transpose {
            rows,
            dst: dst.as_mut_ptr(),
            ld: strip,
            columns: ld,
        };
        // SAFETY: as above; the panel holds all strips of a tile.
        unsafe { (run.kernels.transpose)(&transpose) };
    }
}

/// Rows of weights, `ldp` apart.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    pub p: &'a [f32],
    pub ldp: usize,
    pub rows: usize,
}

/// The staged values of a tile: column `c` of value `j` lies at
/// `panel[c / strip · strip · KEY_TILE + j · strip + c % strip]`.
pub struct Values {
    panel: *const f32,
    finite: bool,
}

impl Values {
    /// Stages the values at `offsets`.
    pub fn stage(run: &Run<'_>, head: usize, offsets: &[i64], panel: &mut [f32]) -> Values {
        let strip = run.kernels.strip;
        assert!(panel.len() >= run.shape.ld_vo.next_multiple_of(strip) * KEY_TILE);
        let stage = Stage {
            rows: run.v.rows(head, offsets),
            dim: run.shape.dim_vo,
            dst: panel.as_mut_ptr(),
            width: strip,
            strip: strip * KEY_TILE,
        };
        // SAFETY: the values were located within the cache; the panel has room for a tile.
        let finite = unsafe { run.kernels.stage[run.kv_dtype as usize](&stage) };
        Values {
            panel: panel.as_ptr(),
            finite,
        }
    }

    /// `o = alpha · o + p · v` over the values `seen`; column 0 of `p` belongs to the first of them.
    pub fn accumulate(
        &self,
        run: &Run<'_>,
        p: Weights<'_>,
        seen: Range<usize>,
        o: &mut [f32],
        alpha: &[f32],
    ) {
        let ld = run.shape.ld_vo;
        assert!(o.len() >= p.rows * ld && alpha.len() >= p.rows);
        assert!(p.p.len() >= (p.rows - 1) * p.ldp + seen.len());
        if self.finite {
            self.product(run, p, seen, o, alpha);
            return;
        }
        // A weight of 0 must not meet an infinity or NaN: only keys with a weight are added.
        for row in 0..p.rows {
            let (weights, o) = (&p.p[row * p.ldp..], &mut o[row * ld..]);
            let one = |p| Weights { p, ldp: 0, rows: 1 };
            self.product(run, one(weights), seen.start..seen.start, o, &alpha[row..]);
            for j in seen.clone() {
                let weight = &weights[j - seen.start..];
                if weight[0] != 0.0 {
                    self.product(run, one(weight), j..j + 1, o, &[1.0]);
                }
            }
        }
    }

    fn product(
        &self,
        run: &Run<'_>,
        p: Weights<'_>,
        seen: Range<usize>,
        o: &mut [f32],
        alpha: &[f32],
    ) {
        let (ld, strip) = (run.shape.ld_vo, run.kernels.strip);
        for column in (0..ld).step_by(strip) {
            let product = Product {
                a: p.p.as_ptr(),
                lda: p.ldp,
                rows: p.rows,
                depth: seen.len(),
                b: Panel {
                    base: self
                        .panel
                        .wrapping_add(column * KEY_TILE + seen.start * strip),
                    ld: strip,
                },
                columns: strip.min(ld - column),
                c: o[column..].as_mut_ptr(),
                ldc: ld,
                alpha: alpha.as_ptr(),
            };
            // SAFETY: `accumulate` checked the room; `seen` lies within the staged tile.
            unsafe { (run.kernels.product)(&product) };
        }
    }
}
