//! Vector `2^x` for the softmax and `tanh` for the soft cap.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "arithmetic under the contract of `Simd`; nothing here touches memory"
)]

use super::simd::Simd;

/// `2^f` on [0, 1), highest power first: a Remez fit with 2^0 exact, relative error 2.0e-9.
const EXP2: [f32; 7] = [
    2.161_291_5e-4,
    1.246_784_6e-3,
    9.675_456e-3,
    5.548_528e-2,
    2.402_293e-1,
    6.931_470_4e-1,
    1.0,
];

/// The same with a relative error of 8.6e-5, for weights that are then rounded to bf16, with an error of 2e-3.
const EXP2_SHORT: [f32; 4] = [7.706_704e-2, 2.276_45e-1, 6.951_168e-1, 1.0];

/// `(tanh(x) / x - 1) / x²` as a polynomial in x² for |x| < 0.625, highest power first (the fit of
/// Moshier's Cephes library, relative error of tanh 2e-8).
const TANH: [f32; 5] = [
    -5.704_988_7e-3,
    2.063_909e-2,
    -5.373_971_6e-2,
    1.333_144_3e-1,
    -3.333_328e-1,
];

#[inline(always)]
unsafe fn polynomial<S: Simd, const N: usize>(x: S::V, coefficients: &[f32; N]) -> S::V {
    let mut y = S::splat(coefficients[0]);
    for &coefficient in &coefficients[1..] {
        y = S::fma(y, x, S::splat(coefficient));
    }
    y
}

/// `2^x` for x up to 126, within 2 ulp; exactly 0 for -inf, and for everything below 2^-126 or, with
/// AVX-512, below the least denormal; NaN stays.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub unsafe fn exp2<S: Simd>(x: S::V) -> S::V {
    let (n, f) = S::split_exponent(x);
    S::scale2(polynomial::<S, 7>(f, &EXP2), n)
}

/// `2^x` with a relative error of 9e-5; exact where x is a whole number.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub unsafe fn exp2_short<S: Simd>(x: S::V) -> S::V {
    let (n, f) = S::split_exponent(x);
    S::scale2(polynomial::<S, 4>(f, &EXP2_SHORT), n)
}

/// `tanh x`, within 4 ulp; NaN stays.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub unsafe fn tanh<S: Simd>(x: S::V) -> S::V {
    let zero = S::splat(0.0);
    let magnitude = S::max(S::sub(zero, x), x);
    let squared = S::mul(x, x);
    let small = S::fma(S::mul(x, squared), polynomial::<S, 5>(squared, &TANH), x);
    // 1 - 2 / (e^2|x| + 1), with |x| clamped where the result is 1 anyway.
    let twice = S::mul(magnitude, S::splat(2.0 * std::f32::consts::LOG2_E));
    let power = exp2::<S>(S::min(S::splat(64.0), twice));
    let one = S::splat(1.0);
    let large = S::sub(one, S::div(S::splat(2.0), S::add(power, one)));
    let large = S::select_lt(x, zero, S::sub(zero, large), large);
    S::select_lt(magnitude, S::splat(0.625), small, large)
}

#[cfg(test)]
mod tests {
    use super::super::simd::Task;
    use super::*;
    use crate::cpu::isa::for_each_isa;

    #[derive(Clone, Copy)]
    struct Apply {
        x: *const f32,
        y: *mut f32,
        n: usize,
        tanh: bool,
    }

    impl Task for Apply {
        type Output = ();
        #[inline(always)]
        unsafe fn run<S: Simd>(&self) {
            for i in (0..self.n).step_by(S::LANES) {
                let x = S::load(self.x.add(i));
                let y = if self.tanh {
                    tanh::<S>(x)
                } else {
                    exp2::<S>(x)
                };
                S::store(self.y.add(i), y);
            }
        }
    }

    fn worst(inputs: &[f32], tanh: bool, exact: impl Fn(f64) -> f64) -> f64 {
        let mut worst = 0f64;
        for_each_isa(|isa| {
            let mut y = vec![0f32; inputs.len()];
            let task = Apply {
                x: inputs.as_ptr(),
                y: y.as_mut_ptr(),
                n: inputs.len(),
                tanh,
            };
            isa.run_task(&task);
            for (&x, &y) in inputs.iter().zip(&y) {
                let want = exact(f64::from(x));
                let error = ((f64::from(y) - want) / want).abs();
                assert!(!error.is_nan(), "{x} gives {y}");
                worst = worst.max(error);
            }
        });
        worst
    }

    #[test]
    fn exp2_and_tanh_are_close() {
        let grid: Vec<f32> = (0..1 << 16)
            .map(|i| -120.0 + i as f32 * 120.0 / 65535.0)
            .collect();
        assert!(worst(&grid, false, f64::exp2) < 2.4e-7);
        let grid: Vec<f32> = (0..1 << 16)
            .map(|i| (i as f32 - 32767.5) / 4096.0)
            .collect();
        assert!(worst(&grid, true, f64::tanh) < 4.8e-7);
    }

    #[test]
    fn the_ends_are_exact() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let x = [
            -inf, -1e30, -300.0, 0.0, nan, -1.0, -2.0, -126.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
            0.0,
        ];
        for_each_isa(|isa| {
            let mut y = [7f32; 16];
            let (p, q) = (x.as_ptr(), y.as_mut_ptr());
            isa.run_task(&Apply {
                x: p,
                y: q,
                n: 16,
                tanh: false,
            });
            assert_eq!(y[..4], [0.0, 0.0, 0.0, 1.0]);
            assert!(y[4].is_nan());
            assert_eq!(y[5..9], [0.5, 0.25, (-126f32).exp2(), 2.0]);
            isa.run_task(&Apply {
                x: p,
                y: q,
                n: 16,
                tanh: true,
            });
            assert_eq!(y[..4], [-1.0, -1.0, -1.0, 0.0]);
            assert!(y[4].is_nan());
        });
    }
}
