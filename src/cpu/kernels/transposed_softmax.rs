//! One step of the online softmax over transposed scores: 32 keys × 32 query rows, with a row of memory per key.
//! Query rows are lanes, so maxima and sums need no operation across lanes. The weights of two keys are stored as a
//! pair, as the matrix products read them.
//!
//! Scores are in base 2, and weights relative to the row maximum, as in `softmax`. A step uses the maximum as it is,
//! and only checks what the weights add up to. Where that is too much, the maximum is updated, the row rescaled and
//! the step taken again. (Looking for the maximum in every step would take a seventh of its time.)
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use super::bf16_block::SIDE;
use super::exp::{exp2, exp2_short};
use super::simd::{Simd, Task};
use super::softmax::{Logits, alibi, logit, with_bias};
use std::f32::consts::LOG2_E;

/// Times that other work is interleaved with a step.
pub const SLOTS: usize = 8;

/// Work that is interleaved with a step, so that matrix instructions run at the same time. It must be inlined into
/// the loop: a call would spill all vectors to the stack.
pub trait Interleaved: Copy {
    /// Called with 0 .. SLOTS.
    fn advance(self, slot: usize);
}

/// No work.
impl Interleaved for () {
    #[inline(always)]
    fn advance(self, _: usize) {}
}

/// Most vectors that hold a value per query row.
const ROW_VECTORS: usize = 8;

/// The 32 weights of a row must add up to less than this. The sums of many steps, and outputs, then stay far from
/// overflow.
const LIMIT: f32 = 256.0;

/// Turns scores into weights, each the sum of `PARTS` bf16 numbers, and pairs them: part `i` of the weight of key
/// `j` in row `c` is stored at `p[i · 1024 + (j / 2 · 32 + c) · 2 + j % 2]`. Adds the weights, before they are
/// rounded, to the row sums. Nothing is added, and true returned, where the weights of some row reach [`LIMIT`] or
/// are NaN, or the row sees its first key.
#[derive(Clone, Copy)]
pub struct ComputeWeights<M, const PARTS: usize> {
    pub s: *const f32,
    pub p: *mut u16,
    /// Factor on the scores, log2 e included; at least 0.
    pub scale: f32,
    /// Row maximum and row sum.
    pub max: *const f32,
    pub sum: *mut f32,
    /// [`Rescale`] has updated the maxima for this very step, so the weights are added whatever they are.
    pub max_is_final: bool,
    pub interleaved: M,
}

impl<M: Interleaved, const PARTS: usize> Task for ComputeWeights<M, PARTS> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) -> bool {
        let vectors = SIDE / S::LANES;
        let zero = S::splat(0.0);
        let scale = S::splat(self.scale);
        let mut negated = [zero; ROW_VECTORS];
        for v in 0..vectors {
            let reference = S::load(self.max.add(v * S::LANES));
            // For a row that saw no key yet, the first visible key makes the sum too large.
            let seen = S::sub(zero, reference);
            negated[v] = S::min(S::splat(f32::MAX), seen);
        }
        let mut sums = [zero; ROW_VECTORS];
        for slot in 0..SLOTS {
            self.interleaved.advance(slot);
            for key in (slot * SIDE / SLOTS..(slot + 1) * SIDE / SLOTS).step_by(2) {
                for v in 0..vectors {
                    let at = self.s.add(key * SIDE + v * S::LANES);
                    let (a, b) = (S::load(at), S::load(at.add(SIDE)));
                    let mut a = weight::<S, PARTS>(S::fma(a, scale, negated[v]));
                    let mut b = weight::<S, PARTS>(S::fma(b, scale, negated[v]));
                    sums[v] = S::add(sums[v], S::add(a, b));
                    for part in 0..PARTS {
                        let p = self.p.add(part * SIDE * SIDE + key * SIDE);
                        S::store_bf16_pairs(p.add(2 * v * S::LANES), a, b);
                        a = S::sub(a, S::nearest_bf16(a));
                        b = S::sub(b, S::nearest_bf16(b));
                    }
                }
            }
        }
        let mut grown = zero;
        for v in 0..vectors {
            grown = S::select_lt(sums[v], S::splat(LIMIT), grown, S::splat(1.0));
        }
        if !self.max_is_final && S::max_lane(grown) > 0.0 {
            return true;
        }
        for v in 0..vectors {
            let sum = self.sum.add(v * S::LANES);
            S::store(sum, S::add(S::load(sum), sums[v]));
        }
        false
    }
}

/// `2^x`; weights that are rounded to a single bf16 number need less precision.
#[inline(always)]
unsafe fn weight<S: Simd, const PARTS: usize>(x: S::V) -> S::V {
    let x = S::clamp_exponent(x);
    if PARTS == 1 {
        exp2_short::<S>(x)
    } else {
        exp2::<S>(x)
    }
}

/// Updates the row maxima of the rows that some score of this step exceeds, and rescales the row sums and `o`. No
/// weight of the step exceeds 1 then. NaN does not count as a score; the row sum becomes NaN by its weight.
#[derive(Clone, Copy)]
pub struct Rescale {
    pub s: *const f32,
    /// As in [`ComputeWeights`].
    pub scale: f32,
    pub max: *mut f32,
    pub sum: *mut f32,
    /// `dims` rows of 32.
    pub o: *mut f32,
    pub dims: usize,
}

impl Task for Rescale {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for row in (0..SIDE).step_by(S::LANES) {
            let mut top = S::splat(f32::NEG_INFINITY);
            for key in 0..SIDE {
                top = S::max(top, S::load(self.s.add(key * SIDE + row)));
            }
            let top = S::mul(top, S::splat(self.scale));
            let old = S::load(self.max.add(row));
            S::store(self.max.add(row), S::select_lt(old, top, top, old));
            let step = S::select_lt(old, top, S::sub(old, top), S::splat(0.0));
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

/// Multiplies outputs by a factor per row, rounds them to bf16, and pairs columns: columns `2i` and `2i + 1` of row
/// `c` become word `c` of row `i` of `dst`, which has 32 words.
#[derive(Clone, Copy)]
pub struct RoundPairs {
    /// `dims` rows of 32.
    pub o: *const f32,
    /// A multiple of 2.
    pub dims: usize,
    pub factors: *const f32,
    pub dst: *mut u16,
}

impl Task for RoundPairs {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for row in (0..SIDE).step_by(S::LANES) {
            let factor = S::load(self.factors.add(row));
            for dim in (0..self.dims).step_by(2) {
                let o = self.o.add(dim * SIDE + row);
                let (a, b) = (S::load(o), S::load(o.add(SIDE)));
                let dst = self.dst.add(dim * SIDE + 2 * row);
                S::store_bf16_pairs(dst, S::mul(factor, a), S::mul(factor, b));
            }
        }
    }
}

/// Raw scores to logits in base 2, in place: scale, soft cap, ALiBi and bias.
#[derive(Clone, Copy)]
pub struct ToLogits {
    pub s: *mut f32,
    pub logits: Logits,
    /// Null, or one slope per row.
    pub slopes: *const f32,
    /// Position of each row minus that of the first key.
    pub distances: *const f32,
    /// Null, or what is added to each, in base e.
    pub biases: *const f32,
}

impl Task for ToLogits {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for row in (0..SIDE).step_by(S::LANES) {
            for key in 0..SIDE {
                let at = self.s.add(key * SIDE + row);
                let mut x = logit::<S>(self.logits, S::load(at));
                if !self.slopes.is_null() {
                    let slope = S::mul(S::load(self.slopes.add(row)), S::splat(LOG2_E));
                    let row_distance = S::load(self.distances.add(row));
                    let distance = S::sub(S::splat(key as f32), row_distance);
                    x = S::add(x, alibi::<S>(slope, distance, self.logits.alibi_sqrt));
                }
                if !self.biases.is_null() {
                    x = with_bias::<S>(x, S::load(self.biases.add(key * SIDE + row)));
                }
                S::store(at, x);
            }
        }
    }
}

/// Masks keys: the scores of keys outside of `low .. high` become -inf. Both bounds count from the first key, one
/// per row.
#[derive(Clone, Copy)]
pub struct MaskRange {
    pub s: *mut f32,
    pub low: *const f32,
    pub high: *const f32,
}

impl Task for MaskRange {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, for_each_isa};
    use half::bf16;

    /// 32 × 32 scores of some spread, all different.
    fn scores() -> Vec<f32> {
        let score = |i: usize| ((i * 7919) % 1024) as f32 / 64.0 - 8.0;
        (0..SIDE * SIDE).map(score).collect()
    }

    /// A step of rows that saw no key yet, and what it reads and writes.
    struct Step {
        isa: Isa,
        s: Vec<f32>,
        p: Vec<u16>,
        max: [f32; SIDE],
        sum: [f32; SIDE],
        /// Two rows.
        o: [f32; 2 * SIDE],
    }

    impl Step {
        fn new(isa: Isa, s: Vec<f32>) -> Step {
            Step {
                isa,
                s,
                p: vec![0; SIDE * SIDE],
                max: [f32::NEG_INFINITY; SIDE],
                sum: [0.0; SIDE],
                o: [1.0; 2 * SIDE],
            }
        }

        fn weigh(&mut self, scale: f32, max_is_final: bool) -> bool {
            self.isa.run_task(&ComputeWeights::<_, 1> {
                s: self.s.as_ptr(),
                p: self.p.as_mut_ptr(),
                scale,
                max: self.max.as_ptr(),
                sum: self.sum.as_mut_ptr(),
                max_is_final,
                interleaved: (),
            })
        }

        fn follow(&mut self, scale: f32) {
            self.isa.run_task(&Rescale {
                s: self.s.as_ptr(),
                scale,
                max: self.max.as_mut_ptr(),
                sum: self.sum.as_mut_ptr(),
                o: self.o.as_mut_ptr(),
                dims: 2,
            });
        }
    }

    fn hidden(key: usize, row: usize) -> bool {
        key < row / 2 || key >= SIDE - row / 4
    }

    #[test]
    fn weights_are_powers_relative_to_a_reference_that_follows() {
        for_each_isa(|isa| {
            let mut s = scores();
            let low: Vec<f32> = (0..SIDE).map(|row| (row / 2) as f32).collect();
            let high: Vec<f32> = (0..SIDE).map(|row| (SIDE - row / 4) as f32).collect();
            isa.run_task(&MaskRange {
                s: s.as_mut_ptr(),
                low: low.as_ptr(),
                high: high.as_ptr(),
            });
            let mut step = Step::new(isa, s);
            assert!(step.weigh(0.5, false), "{isa:?}: nothing was seen before");
            step.follow(0.5);
            assert!(step.o.iter().all(|&o| o == 0.0), "{isa:?}");
            assert!(
                !step.weigh(0.5, false),
                "{isa:?}: the reference is the maximum"
            );
            let Step { p, max, sum, .. } = step;
            let raw = scores();
            for row in 0..SIDE {
                let seen = (0..SIDE).filter(|&key| !hidden(key, row));
                let largest = seen
                    .clone()
                    .map(|key| raw[key * SIDE + row])
                    .fold(f32::MIN, f32::max);
                assert_eq!(max[row], largest * 0.5, "{isa:?}");
                let mut total = 0.0;
                for key in 0..SIDE {
                    let got = bf16::from_bits(p[(key / 2 * SIDE + row) * 2 + key % 2]).to_f32();
                    let want = match hidden(key, row) {
                        true => 0.0,
                        false => (raw[key * SIDE + row] * 0.5 - max[row]).exp2(),
                    };
                    assert!((got - want).abs() <= want / 255.0, "{isa:?}: {got} {want}");
                    total += want;
                }
                assert!((sum[row] - total).abs() < total * 1e-4, "{isa:?}");
            }
        });
    }

    #[test]
    fn outputs_are_scaled_rounded_and_paired() {
        for_each_isa(|isa| {
            let o: Vec<f32> = (0..4 * SIDE).map(|i| i as f32 / 7.0).collect();
            let factors: Vec<f32> = (0..SIDE).map(|row| row as f32 - 5.0).collect();
            let mut dst = vec![0u16; 4 * SIDE];
            isa.run_task(&RoundPairs {
                o: o.as_ptr(),
                dims: 4,
                factors: factors.as_ptr(),
                dst: dst.as_mut_ptr(),
            });
            for (i, got) in dst.into_iter().enumerate() {
                let (pair, row, half) = (i / 2 / SIDE, i / 2 % SIDE, i % 2);
                let want = bf16::from_f32(o[(2 * pair + half) * SIDE + row] * factors[row]);
                assert_eq!(bf16::from_bits(got), want, "{isa:?} {i}");
            }
        });
    }

    #[test]
    fn a_reference_stays_until_weights_add_up_to_too_much() {
        for_each_isa(|isa| {
            // 32 weights of 2² are accepted, 32 weights of 2³ are not.
            let mut step = Step {
                max: [0.0; SIDE],
                sum: [1.0; SIDE],
                ..Step::new(isa, vec![2.0; SIDE * SIDE])
            };
            assert!(!step.weigh(1.0, false));
            assert_eq!(step.sum, [129.0; SIDE], "{isa:?}");
            assert!(step.weigh(1.5, false));
            assert_eq!(
                step.sum, [129.0; SIDE],
                "{isa:?}: the step will be taken again"
            );
            assert!(!step.weigh(1.5, true));
            assert_eq!(step.sum, [385.0; SIDE], "{isa:?}");
        });
    }

    #[test]
    fn a_nan_makes_the_sum_of_its_row_nan_and_no_other() {
        for_each_isa(|isa| {
            let mut step = Step::new(isa, scores());
            step.s[3 * SIDE + 9] = f32::NAN;
            assert!(step.weigh(1.0, false), "{isa:?}");
            step.follow(1.0);
            assert!(step.weigh(1.0, false), "{isa:?}: that will not go away");
            assert!(!step.weigh(1.0, true), "{isa:?}");
            for (row, sum) in step.sum.into_iter().enumerate() {
                assert_eq!(sum.is_nan(), row == 9, "{isa:?} {row}: {sum}");
            }
        });
    }

    #[test]
    fn a_first_key_moves_the_reference_however_small_its_score() {
        for_each_isa(|isa| {
            for score in [-1e30f32, -300.0, 0.0, 300.0, 1e30] {
                let mut step = Step::new(isa, vec![f32::NEG_INFINITY; SIDE * SIDE]);
                step.s[5 * SIDE + 7] = score;
                assert!(step.weigh(1.0, false), "{isa:?} {score}");
                step.follow(1.0);
                assert!(!step.weigh(1.0, false), "{isa:?} {score}");
                let Step { max, sum, .. } = step;
                for row in 0..SIDE {
                    let seen = row == 7;
                    assert_eq!(sum[row], f32::from(u8::from(seen)), "{isa:?} {score}");
                    let want = if seen { score } else { f32::NEG_INFINITY };
                    assert_eq!(max[row], want, "{isa:?} {score}");
                }
            }
        });
    }
}
