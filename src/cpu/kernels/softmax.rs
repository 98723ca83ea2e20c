//! One step of the online softmax: the scores of a tile of keys become weights, in place.
//!
//! Scores are in base 2: the factor log2 e is part of `scale`. The query heads of one token see the same keys, so a
//! call takes the rows of one token or more, and computes four at a time to overlap their dependent chains. A mask
//! is a range, plus a row of limits where it has holes.
//!
//! Weights are relative to the row maximum that is kept per row. It is updated only when a score exceeds it by more
//! than 2^8, so sums and outputs are seldom rescaled.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use super::exp::{exp2, tanh};
use super::simd::{Simd, Task};
use crate::problem::LEAST_BIAS;
use std::f32::consts::LOG2_E;

/// How raw scores become logits. The same for all rows of a KV head.
#[derive(Debug, Clone, Copy)]
pub struct Logits {
    /// Factor on q·k, without log2 e.
    pub scale: f32,
    /// Soft cap, or 0.
    pub cap: f32,
    /// ALiBi in its square-root form.
    pub alibi_sqrt: bool,
}

/// How far, in base 2, scores may exceed the row maximum before it is updated and the row rescaled.
pub const RESCALE_THRESHOLD: f32 = 8.0;

/// Scores in base 2 up to which a score times the scale may be fused with the subtraction of the row maximum. The
/// maximum is rounded and the fused product is not: at 2^26 they differ by 4, which the slack covers. At 2^32 they
/// differ by up to 128, and the weight of the largest key would be 0 or infinite.
const LARGEST_FUSED: f32 = 67_108_864.0;

/// Whether a score in base 2, but for infinities, is too large to be fused.
#[inline(always)]
pub fn is_too_large_to_fuse(score: f32) -> bool {
    let magnitude = score.abs();
    magnitude > LARGEST_FUSED && magnitude < f32::INFINITY
}

/// Rows of scores, `lds` apart, `n` keys each, with room for a multiple of 32.
#[derive(Clone, Copy)]
pub struct Softmax {
    pub s: *mut f32,
    pub lds: usize,
    pub rows: usize,
    pub n: usize,
    pub logits: Logits,
    /// Visible keys: `low..high` of the tile, at most `n`.
    pub low: usize,
    pub high: usize,
    /// Null, or one float per key (room for a multiple of 16): +inf where visible, -inf where not.
    pub limits: *const f32,
    /// Null, or one slope per row.
    pub slopes: *const f32,
    /// Null, or one float per key (room for a multiple of 16) that is added to the logits of all rows, in base e.
    pub biases: *const f32,
    /// Position of the first key of the tile minus that of the row.
    pub distance: f32,
    /// Row maximum, row sum, and the factor that rescales what was accumulated so far; one per row.
    pub max: *mut f32,
    pub sum: *mut f32,
    pub alpha: *mut f32,
}

impl Task for Softmax {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let mut r = 0;
        while r + 4 <= self.rows {
            block::<S, 4>(self, r);
            r += 4;
        }
        while r < self.rows {
            block::<S, 1>(self, r);
            r += 1;
        }
    }
}

#[inline(always)]
unsafe fn block<S: Simd, const R: usize>(task: &Softmax, first: usize) {
    let begin = task.low / S::LANES * S::LANES;
    let end = task.high.next_multiple_of(S::LANES);
    let rows: [*mut f32; R] = std::array::from_fn(|r| task.s.wrapping_add((first + r) * task.lds));
    let plain = task.logits.cap == 0.0
        && task.slopes.is_null()
        && task.biases.is_null()
        && task.limits.is_null()
        && task.logits.scale > 0.0;
    if !plain {
        for r in 0..R {
            to_logits::<S>(task, first + r, rows[r], begin, end);
        }
    }
    for row in rows {
        mask_range::<S>(task, row, begin, end);
    }
    let mut scale = if plain {
        task.logits.scale * LOG2_E
    } else {
        1.0
    };
    let tops = largest::<S, R>(rows, begin, end).map(|top| top * scale);
    if plain && tops.into_iter().any(is_too_large_to_fuse) {
        for r in 0..R {
            to_logits::<S>(task, first + r, rows[r], begin, end);
        }
        scale = 1.0;
    }
    let maxima = update_max::<S, R>(task, first, tops);
    for row in rows {
        fill::<S>(row, 0, begin);
        fill::<S>(row, end, task.n);
    }
    weights::<S, R>(task, first, rows, begin, end, scale, maxima);
}

/// Whether rows with these maxima saw no key yet. Their accumulated outputs may then hold anything.
pub fn saw_no_key(max: &[f32]) -> bool {
    max.iter().all(|&max| max == f32::NEG_INFINITY)
}

/// Updates the row maxima and rescales the sums. Returns the maxima negated; 0 for rows that saw no key yet.
#[inline(always)]
unsafe fn update_max<S: Simd, const R: usize>(
    task: &Softmax,
    first: usize,
    tops: [f32; R],
) -> [f32; R] {
    let mut moved = [0f32; 16];
    let mut any = false;
    let mut negated = [0f32; R];
    for r in 0..R {
        let reference = &mut *task.max.add(first + r);
        let old = *reference;
        if old == f32::NEG_INFINITY || tops[r] > old + RESCALE_THRESHOLD {
            *reference = tops[r];
            // A maximum that stays -inf has no difference: -inf - -inf is NaN.
            moved[r] = if tops[r] == old { 0.0 } else { old - tops[r] };
            any = true;
        }
        negated[r] = if *reference == f32::NEG_INFINITY {
            0.0
        } else {
            -*reference
        };
    }
    if any {
        for i in (0..R).step_by(S::LANES) {
            let alpha = exp2::<S>(S::load(moved.as_ptr().add(i)));
            S::store(moved.as_mut_ptr().add(i), alpha);
        }
    } else {
        moved = [1.0; 16];
    }
    for r in 0..R {
        *task.alpha.add(first + r) = moved[r];
        *task.sum.add(first + r) *= moved[r];
    }
    negated
}

/// Scale, soft cap, ALiBi, bias and limits, in place and in base 2.
#[inline(always)]
unsafe fn to_logits<S: Simd>(task: &Softmax, r: usize, s: *mut f32, begin: usize, end: usize) {
    for i in (begin..end).step_by(S::LANES) {
        let mut x = logit::<S>(task.logits, S::load(s.add(i)));
        if !task.slopes.is_null() {
            let slope = S::splat(*task.slopes.add(r) * LOG2_E);
            let distance = S::add(S::iota(), S::splat(task.distance + i as f32));
            x = S::add(x, alibi::<S>(slope, distance, task.logits.alibi_sqrt));
        }
        if !task.biases.is_null() {
            x = with_bias::<S>(x, S::load(task.biases.add(i)));
        }
        if !task.limits.is_null() {
            x = S::min(x, S::load(task.limits.add(i)));
        }
        S::store(s.add(i), x);
    }
}

/// A raw score times the scale, capped, in base 2.
#[inline(always)]
pub unsafe fn logit<S: Simd>(logits: Logits, x: S::V) -> S::V {
    let Logits { scale, cap, .. } = logits;
    if cap > 0.0 {
        let x = tanh::<S>(S::mul(x, S::splat(scale / cap)));
        S::mul(x, S::splat(cap * LOG2_E))
    } else {
        S::mul(x, S::splat(scale * LOG2_E))
    }
}

/// `slope · (j - p)`, or `-slope · sqrt(p - j)` for keys up to the row's own and 0 beyond.
#[inline(always)]
pub unsafe fn alibi<S: Simd>(slope: S::V, distance: S::V, sqrt: bool) -> S::V {
    if !sqrt {
        return S::mul(slope, distance);
    }
    let zero = S::splat(0.0);
    let past = S::max(S::sub(zero, distance), zero);
    S::mul(S::sub(zero, slope), S::sqrt(past))
}

/// A logit in base 2 and what is added to it, in base e.
#[inline(always)]
pub unsafe fn with_bias<S: Simd>(x: S::V, bias: S::V) -> S::V {
    let sum = S::fma(bias, S::splat(LOG2_E), x);
    let hidden = S::splat(f32::NEG_INFINITY);
    S::select_lt(bias, S::splat(LEAST_BIAS), hidden, sum)
}

/// Masks keys outside of `low..high`: their scores become -inf.
#[inline(always)]
unsafe fn mask_range<S: Simd>(task: &Softmax, s: *mut f32, begin: usize, end: usize) {
    let hidden = S::splat(f32::NEG_INFINITY);
    for i in (begin..end).step_by(S::LANES) {
        if i < task.low || i + S::LANES > task.high {
            let j = S::add(S::iota(), S::splat(i as f32));
            let x = S::load(s.add(i));
            let x = S::select_lt(j, S::splat(task.low as f32), hidden, x);
            let x = S::select_lt(j, S::splat(task.high as f32), x, hidden);
            S::store(s.add(i), x);
        }
    }
}

#[inline(always)]
unsafe fn largest<S: Simd, const R: usize>(
    rows: [*mut f32; R],
    begin: usize,
    end: usize,
) -> [f32; R] {
    let mut max = [S::splat(f32::NEG_INFINITY); R];
    for i in (begin..end).step_by(S::LANES) {
        for r in 0..R {
            max[r] = S::max(max[r], S::load(rows[r].add(i)));
        }
    }
    let mut tops = [0.0; R];
    for r in 0..R {
        tops[r] = S::max_lane(max[r]);
    }
    tops
}

/// `2^(s · scale - max)` in place; adds to the row sums.
#[inline(always)]
unsafe fn weights<S: Simd, const R: usize>(
    task: &Softmax,
    first: usize,
    rows: [*mut f32; R],
    begin: usize,
    end: usize,
    scale: f32,
    negated: [f32; R],
) {
    let mut sums = [S::splat(0.0); R];
    for i in (begin..end).step_by(S::LANES) {
        for r in 0..R {
            let s = S::load(rows[r].add(i));
            let p = exp2::<S>(S::fma(s, S::splat(scale), S::splat(negated[r])));
            sums[r] = S::add(sums[r], p);
            S::store(rows[r].add(i), p);
        }
    }
    for r in 0..R {
        *task.sum.add(first + r) += S::sum(sums[r]);
    }
}

#[inline(always)]
unsafe fn fill<S: Simd>(s: *mut f32, begin: usize, end: usize) {
    for i in (begin..end).step_by(S::LANES) {
        S::store(s.add(i), S::splat(0.0));
    }
}
