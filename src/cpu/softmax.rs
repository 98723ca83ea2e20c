//! One step of the online softmax: scores of a tile of keys become weights, in place.
//!
//! Scores live in base 2 (the factor log2 e is part of `scale`). Query heads of one token share what they
//! see, so a call serves one token's rows. Masks are ranges plus, for masks with holes, a row of limits.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]

use super::exp::{exp2, tanh};
use super::simd::{Simd, Task};
use std::f32::consts::LOG2_E;

/// How raw scores become logits; the same for all rows of a KV head.
#[derive(Debug, Clone, Copy)]
pub struct Logits {
    /// Factor on q·k, without log2 e.
    pub scale: f32,
    /// Soft cap, or 0.
    pub cap: f32,
    /// ALiBi in its square-root form.
    pub alibi_sqrt: bool,
}

/// Rows of scores, `lds` apart, `n` keys each, with room for a multiple of 16.
#[derive(Clone, Copy)]
pub struct Softmax {
    pub s: *mut f32,
    pub lds: usize,
    pub rows: usize,
    pub n: usize,
    pub logits: Logits,
    /// Keys in sight: `low..high` of the tile, at most `n`.
    pub low: usize,
    pub high: usize,
    /// Null, or one float per key (room for a multiple of 16): +inf in sight, -inf not.
    pub limits: *const f32,
    /// Null, or one slope per row.
    pub slopes: *const f32,
    /// Position of the tile's first key minus that of the row.
    pub distance: f32,
    /// Running maximum, sum and the factor for what was accumulated so far; one per row.
    pub max: *mut f32,
    pub sum: *mut f32,
    pub alpha: *mut f32,
}

impl Task for Softmax {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for r in 0..self.rows {
            row::<S>(self, r);
        }
    }
}

#[inline(always)]
unsafe fn row<S: Simd>(task: &Softmax, r: usize) {
    let s = task.s.add(r * task.lds);
    let begin = task.low / S::LANES * S::LANES;
    let end = task.high.next_multiple_of(S::LANES);
    let plain = task.logits.cap == 0.0
        && task.slopes.is_null()
        && task.limits.is_null()
        && task.logits.scale > 0.0;
    let scale = if plain {
        task.logits.scale * LOG2_E
    } else {
        shape::<S>(task, r, s, begin, end);
        1.0
    };
    let (old, sum) = (&mut *task.max.add(r), &mut *task.sum.add(r));
    let new = (largest::<S>(task, s, begin, end) * scale).max(*old);
    *task.alpha.add(r) = 1.0;
    if new == f32::NEG_INFINITY || task.low >= task.high {
        fill::<S>(s, 0, task.n);
        return;
    }
    if new != *old {
        let alpha = S::max_lane(exp2::<S>(S::splat(*old - new)));
        *task.alpha.add(r) = alpha;
        *sum *= alpha;
        *old = new;
    }
    fill::<S>(s, 0, begin);
    *sum += weights::<S>(s, begin, end, scale, new);
    fill::<S>(s, end, task.n);
}

/// Scale, soft cap, ALiBi and limits, in place and in base 2.
#[inline(always)]
unsafe fn shape<S: Simd>(task: &Softmax, r: usize, s: *mut f32, begin: usize, end: usize) {
    let Logits { scale, cap, .. } = task.logits;
    for i in (begin..end).step_by(S::LANES) {
        let mut x = S::load(s.add(i));
        if cap > 0.0 {
            x = tanh::<S>(S::mul(x, S::splat(scale / cap)));
            x = S::mul(x, S::splat(cap * LOG2_E));
        } else {
            x = S::mul(x, S::splat(scale * LOG2_E));
        }
        if !task.slopes.is_null() {
            let slope = *task.slopes.add(r) * LOG2_E;
            let distance = S::add(S::iota(), S::splat(task.distance + i as f32));
            x = S::add(x, alibi::<S>(slope, distance, task.logits.alibi_sqrt));
        }
        if !task.limits.is_null() {
            x = S::min(x, S::load(task.limits.add(i)));
        }
        S::store(s.add(i), x);
    }
}

/// `slope · (j - p)`, or `-slope · sqrt(p - j)` for keys up to the row's own and 0 beyond.
#[inline(always)]
unsafe fn alibi<S: Simd>(slope: f32, distance: S::V, sqrt: bool) -> S::V {
    if !sqrt {
        return S::mul(S::splat(slope), distance);
    }
    let zero = S::splat(0.0);
    let past = S::max(S::sub(zero, distance), zero);
    S::mul(S::splat(-slope), S::sqrt(past))
}

/// The maximum over the keys in sight; scores of the others become -inf.
#[inline(always)]
unsafe fn largest<S: Simd>(task: &Softmax, s: *mut f32, begin: usize, end: usize) -> f32 {
    let hidden = S::splat(f32::NEG_INFINITY);
    let mut max = hidden;
    for i in (begin..end).step_by(S::LANES) {
        let mut x = S::load(s.add(i));
        if i < task.low || i + S::LANES > task.high {
            let j = S::add(S::iota(), S::splat(i as f32));
            x = S::select_lt(j, S::splat(task.low as f32), hidden, x);
            x = S::select_lt(j, S::splat(task.high as f32), x, hidden);
            S::store(s.add(i), x);
        }
        max = S::max(max, x);
    }
    S::max_lane(max)
}

/// `2^(s · scale - max)` in place; returns the sum.
#[inline(always)]
unsafe fn weights<S: Simd>(s: *mut f32, begin: usize, end: usize, scale: f32, max: f32) -> f32 {
    let (scale, minus_max) = (S::splat(scale), S::splat(-max));
    let mut sum = S::splat(0.0);
    for i in (begin..end).step_by(S::LANES) {
        let p = exp2::<S>(S::fma(S::load(s.add(i)), scale, minus_max));
        sum = S::add(sum, p);
        S::store(s.add(i), p);
    }
    S::sum(sum)
}

#[inline(always)]
unsafe fn fill<S: Simd>(s: *mut f32, begin: usize, end: usize) {
    for i in (begin..end).step_by(S::LANES) {
        S::store(s.add(i), S::splat(0.0));
    }
}
