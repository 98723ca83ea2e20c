//! One step of the online softmax over transposed scores: 32 keys × 32 query rows, with a row of memory
//! per key. Rows of queries are lanes, so maxima and sums need no steps across lanes, and the weights of
//! two keys pair up as the matrix products want them.
//!
//! Scores live in base 2, weights relative to a reference that follows the maximum by steps, as in
//! `softmax`. A step first takes the reference as it is and looks at the maximum on the way; only where
//! that has outgrown it, the reference moves and the step is taken again.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use super::exp::{exp2, exp2_short};
use super::simd::{Simd, Task};
use super::softmax::{Logits, SLACK, alibi, logit};
use std::f32::consts::LOG2_E;

/// Keys and query rows of a step.
pub const SIDE: usize = 32;

/// Calls of [`Weights::meanwhile`] per step.
pub const SLOTS: usize = 8;

/// Most vectors that hold a value per query row.
const MOST: usize = 8;

/// Scores to weights in bf16, paired: key `j` of row `c` becomes `p[(j / 2 · 32 + c) · 2 + j % 2]`. Adds
/// to the sums unless some score exceeds its row's reference by more than [`SLACK`]; returns whether one
/// does. The sums are those before rounding.
#[derive(Clone, Copy)]
pub struct Weights<F> {
    pub s: *const f32,
    pub p: *mut u16,
    /// Factor on the scores, log2 e included; at least 0.
    pub scale: f32,
    /// Reference, sum and largest scaled score, one per row.
    pub max: *const f32,
    pub sum: *mut f32,
    pub top: *mut f32,
    /// Called with 0 .. SLOTS in between, so that matrix instructions run at the same time.
    pub meanwhile: F,
}

impl<F: Fn(usize) + Copy> Task for Weights<F> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) -> bool {
        let vectors = SIDE / S::LANES;
        let zero = S::splat(0.0);
        let scale = S::splat(self.scale);
        let mut negated = [zero; MOST];
        for v in 0..vectors {
            let reference = S::load(self.max.add(v * S::LANES));
            // Nothing seen yet: -inf - -inf would be NaN.
            let seen = S::sub(zero, reference);
            negated[v] = S::select_lt(S::splat(f32::MIN), reference, seen, zero);
        }
        let mut sums = [zero; MOST];
        let mut tops = [S::splat(f32::NEG_INFINITY); MOST];
        for slot in 0..SLOTS {
            (self.meanwhile)(slot);
            for key in (slot * SIDE / SLOTS..(slot + 1) * SIDE / SLOTS).step_by(2) {
                for v in 0..vectors {
                    let at = self.s.add(key * SIDE + v * S::LANES);
                    let (a, b) = (S::load(at), S::load(at.add(SIDE)));
                    tops[v] = S::max(tops[v], S::max(a, b));
                    let a = exp2_short::<S>(S::fma(a, scale, negated[v]));
                    let b = exp2_short::<S>(S::fma(b, scale, negated[v]));
                    sums[v] = S::add(sums[v], S::add(a, b));
                    S::store_pairs(self.p.add(key * SIDE + 2 * v * S::LANES), a, b);
                }
            }
        }
        let mut grown = zero;
        for v in 0..vectors {
            let top = S::mul(tops[v], scale);
            let limit = S::add(S::load(self.max.add(v * S::LANES)), S::splat(SLACK));
            grown = S::select_lt(limit, top, S::splat(1.0), grown);
            S::store(self.top.add(v * S::LANES), top);
        }
        if S::max_lane(grown) > 0.0 {
            return true;
        }
        for v in 0..vectors {
            let sum = self.sum.add(v * S::LANES);
            S::store(sum, S::add(S::load(sum), sums[v]));
        }
        false
    }
}

/// Moves the references of the rows that have outgrown theirs to `top`, and brings what was accumulated
/// so far, the sums and `o`, to the new reference.
#[derive(Clone, Copy)]
pub struct Follow {
    pub top: *const f32,
    pub max: *mut f32,
    pub sum: *mut f32,
    /// `dims` rows of 32.
    pub o: *mut f32,
    pub dims: usize,
}

impl Task for Follow {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for row in (0..SIDE).step_by(S::LANES) {
            let old = S::load(self.max.add(row));
            let top = S::load(self.top.add(row));
            let limit = S::add(old, S::splat(SLACK));
            S::store(self.max.add(row), S::select_lt(limit, top, top, old));
            let step = S::select_lt(limit, top, S::sub(old, top), S::splat(0.0));
            let alpha = exp2::<S>(step);
            let sum = self.sum.add(row);
            S::store(sum, S::mul(alpha, S::load(sum)));
            for dim in 0..self.dims {
                let o = self.o.add(dim * SIDE + row);
                S::store(o, S::mul(alpha, S::load(o)));
            }
        }
    }
}

/// Raw scores to logits in base 2, in place: scale, soft cap and ALiBi.
#[derive(Clone, Copy)]
pub struct Shape {
    pub s: *mut f32,
    pub logits: Logits,
    /// Null, or one slope per row.
    pub slopes: *const f32,
    /// Position of each row minus that of the first key.
    pub ahead: *const f32,
}

impl Task for Shape {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for row in (0..SIDE).step_by(S::LANES) {
            for key in 0..SIDE {
                let at = self.s.add(key * SIDE + row);
                let mut x = logit::<S>(self.logits, S::load(at));
                if !self.slopes.is_null() {
                    let slope = S::mul(S::load(self.slopes.add(row)), S::splat(LOG2_E));
                    let ahead = S::load(self.ahead.add(row));
                    let distance = S::sub(S::splat(key as f32), ahead);
                    x = S::add(x, alibi::<S>(slope, distance, self.logits.alibi_sqrt));
                }
                S::store(at, x);
            }
        }
    }
}

/// Scores of keys outside of `low .. high` become -inf; both count from the first key, one per row.
#[derive(Clone, Copy)]
pub struct Hide {
    pub s: *mut f32,
    pub low: *const f32,
    pub high: *const f32,
}

impl Task for Hide {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let hidden = S::splat(f32::NEG_INFINITY);
        for row in (0..SIDE).step_by(S::LANES) {
            let (low, high) = (S::load(self.low.add(row)), S::load(self.high.add(row)));
            for key in 0..SIDE {
                let j = S::splat(key as f32);
                let at = self.s.add(key * SIDE + row);
                let x = S::select_lt(j, low, hidden, S::load(at));
                S::store(at, S::select_lt(j, high, x, hidden));
            }
        }
    }
}
