//! The vocabulary of the kernels: [`Simd`], a vector of f32 lanes, and [`Element`], a type in memory. Kernels are
//! generic over both, so a kernel is written once and compiled for every pair. [`Portable`] is plain Rust;
//! `x86::avx2`, `x86::avx512` and `arm::neon` hold the other vectors.
//!
//! Everything here is `inline(always)`. A kernel becomes AVX-512 code, say, because it is inlined into
//! [`Simd::vectorize`], which is a function with that target feature.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each body is one or two intrinsics under the contract stated on the trait"
)]

use super::prefetch::Level;
use crate::dtype;
use half::{bf16, f16};
use std::marker::PhantomData;

/// A computation that can be compiled for any instruction set.
pub trait Task: Copy {
    /// What it returns.
    type Output;

    /// Computes.
    ///
    /// # Safety
    /// Runs inside [`Simd::vectorize`] of `S`; pointers in `self` are valid as their fields say.
    unsafe fn run<S: Simd>(&self) -> Self::Output;
}

/// A vector of f32 and what the kernels do with it.
///
/// # Safety
/// All functions need a processor with the instruction set, and pointers valid for [`Simd::LANES`]
/// elements; nothing needs to be aligned.
pub trait Simd: Sized + 'static {
    /// The vector.
    type V: Copy;
    /// The row that loads 8 lanes where [`Simd::LANES`] is 16; itself otherwise.
    type Half: Simd;
    /// f32 lanes: 4, 8 or 16.
    const LANES: usize;
    /// Vectors per strip of a matrix product's columns.
    const STRIP: usize;
    /// Most rows of a matrix product's block: with `STRIP` vectors each they fill the registers.
    const BLOCK_ROWS: usize;
    /// Query rows against four keys at once in `Dot`.
    const DOT_ROWS: usize;
    /// The level that kernels for few query rows prefetch into.
    const LEVEL: Level = Level::Second;

    /// Runs a task in a function compiled for this instruction set.
    unsafe fn vectorize<T: Task>(task: &T) -> T::Output;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn store(p: *mut f32, v: Self::V);
    /// A nontemporal store where the instruction set has one. `p` lies on a multiple of the size of a vector. Other
    /// threads see the value after [`Simd::store_fence`].
    unsafe fn store_nontemporal(p: *mut f32, v: Self::V) {
        Self::store(p, v);
    }
    /// Orders this thread's [`Simd::store_nontemporal`] before all its later stores.
    unsafe fn store_fence() {}
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`, fused where the instruction set fuses.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `a > b ? a : b`, so `b` where either is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b`, so `b` where either is NaN.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sqrt(a: Self::V) -> Self::V;
    /// `x = n + f` with f in [0, 1); `n` is for [`Simd::scale2`] only. Where `2^x` is 0, `scale2` returns 0.
    unsafe fn split_exponent(x: Self::V) -> (Self::V, Self::V);
    /// Makes any number safe for [`Simd::split_exponent`]: at most 127, unless `scale2` overflows to infinity by
    /// itself.
    unsafe fn clamp_exponent(x: Self::V) -> Self::V {
        Self::min(Self::splat(127.0), x)
    }
    /// `p · 2^n` for `p` in [1, 2] and an `n` of [`Simd::split_exponent`].
    unsafe fn scale2(p: Self::V, n: Self::V) -> Self::V;
    /// `a < b ? x : y`, lane by lane; `y` where NaN.
    unsafe fn select_lt(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// 0, 1, 2, …
    unsafe fn iota() -> Self::V;
    unsafe fn sum(v: Self::V) -> f32;
    unsafe fn max_lane(v: Self::V) -> f32;
    /// Stores the sums of four vectors as four consecutive floats.
    unsafe fn store_sums(p: *mut f32, v: [Self::V; 4]);
    /// The nearest bf16 number, halves away from zero; undefined for NaN.
    unsafe fn nearest_bf16(v: Self::V) -> Self::V;
    /// Stores numbers of [`Simd::nearest_bf16`].
    unsafe fn store_rounded_bf16(p: *mut u16, v: Self::V) {
        Self::store_bf16(p, v);
    }
    /// Rounds to bf16 (halves away from zero) and stores lane by lane: a, b, a, b, …
    unsafe fn store_bf16_pairs(p: *mut u16, a: Self::V, b: Self::V);
    /// Transposes `LANES` rows of `LANES` 32-bit words; the results are `ld` words apart.
    unsafe fn transpose(rows: &[*const f32], dst: *mut f32, ld: usize);
    /// Eight lanes followed by zeros, where `Half` is another row.
    unsafe fn widen(v: <Self::Half as Simd>::V) -> Self::V;
    /// The first eight lanes.
    unsafe fn narrow(v: Self::V) -> <Self::Half as Simd>::V;

    unsafe fn load_f16(p: *const u16) -> Self::V;
    unsafe fn load_bf16(p: *const u16) -> Self::V;
    unsafe fn load_e4m3(p: *const u8) -> Self::V;
    unsafe fn load_e5m2(p: *const u8) -> Self::V;
    unsafe fn store_f16(p: *mut u16, v: Self::V);
    unsafe fn store_bf16(p: *mut u16, v: Self::V);
    unsafe fn store_e4m3(p: *mut u8, v: Self::V);
    unsafe fn store_e5m2(p: *mut u8, v: Self::V);
}

/// A float type in memory; conversions as in [`crate::dtype`], to the bit.
pub trait Element: Copy + 'static {
    /// Bytes per element.
    const SIZE: usize;
    unsafe fn load<S: Simd>(p: *const u8) -> S::V;
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V);

    /// Eight elements, then zeros.
    #[inline(always)]
    unsafe fn load8<S: Simd>(p: *const u8) -> S::V {
        S::widen(Self::load::<S::Half>(p))
    }

    /// The first eight lanes.
    #[inline(always)]
    unsafe fn store8<S: Simd>(p: *mut u8, v: S::V) {
        Self::store::<S::Half>(p, S::narrow(v));
    }
}

/// The arguments of a kernel that is compiled per element type.
#[derive(Clone, Copy)]
pub struct Typed<E, A>(pub A, pub PhantomData<E>);

/// A vector of the columns from `c` on, of a row of `dim` elements, a multiple of 8. Columns past the end are zero.
#[inline(always)]
pub unsafe fn load_columns<S: Simd, E: Element>(row: *const u8, c: usize, dim: usize) -> S::V {
    if c + S::LANES <= dim {
        E::load::<S>(row.add(c * E::SIZE))
    } else if c < dim {
        E::load8::<S>(row.add(c * E::SIZE))
    } else {
        S::splat(0.0)
    }
}

#[derive(Debug, Clone, Copy)]
pub struct F32;
#[derive(Debug, Clone, Copy)]
pub struct F16;
#[derive(Debug, Clone, Copy)]
pub struct Bf16;
#[derive(Debug, Clone, Copy)]
pub struct E4m3;
#[derive(Debug, Clone, Copy)]
pub struct E5m2;

impl Element for F32 {
    const SIZE: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load(p.cast())
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V) {
        S::store(p.cast(), v);
    }
}

impl Element for F16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_f16(p.cast())
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V) {
        S::store_f16(p.cast(), v);
    }
}

impl Element for Bf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_bf16(p.cast())
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V) {
        S::store_bf16(p.cast(), v);
    }
}

impl Element for E4m3 {
    const SIZE: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_e4m3(p)
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V) {
        S::store_e4m3(p, v);
    }
}

impl Element for E5m2 {
    const SIZE: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::V {
        S::load_e5m2(p)
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(p: *mut u8, v: S::V) {
        S::store_e5m2(p, v);
    }
}

/// Plain Rust on four lanes, which every compiler turns into the baseline vector unit.
pub struct Portable;

impl Portable {
    #[inline(always)]
    fn zip(a: [f32; 4], b: [f32; 4], f: impl Fn(f32, f32) -> f32) -> [f32; 4] {
        std::array::from_fn(|i| f(a[i], b[i]))
    }
}

impl Simd for Portable {
    type V = [f32; 4];
    type Half = Portable;
    const LANES: usize = 4;
    const STRIP: usize = 2;
    const BLOCK_ROWS: usize = 4;
    const DOT_ROWS: usize = 2;

    unsafe fn vectorize<T: Task>(task: &T) -> T::Output {
        task.run::<Portable>()
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        p.cast::<[f32; 4]>().read_unaligned()
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        p.cast::<[f32; 4]>().write_unaligned(v);
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        Self::zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        Self::zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        Self::zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        Self::zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Not `mul_add`: without an FMA unit that is a library call.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        Self::zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        Self::zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn sqrt(a: Self::V) -> Self::V {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    unsafe fn split_exponent(x: Self::V) -> (Self::V, Self::V) {
        // Adding and subtracting 1.5 · 2^23 rounds without a library call. The next line turns that into a floor.
        const MAGIC: f32 = 12_582_912.0;
        let x = Self::max([-127.0; 4], x);
        let n = x.map(|x| {
            let rounded = (x + MAGIC) - MAGIC;
            if rounded > x { rounded - 1.0 } else { rounded }
        });
        (n, Self::sub(x, n))
    }
    #[inline(always)]
    unsafe fn scale2(p: Self::V, n: Self::V) -> Self::V {
        Self::zip(p, n, |p, n| {
            p * f32::from_bits(((n as i32 + 127) as u32) << 23)
        })
    }
    #[inline(always)]
    unsafe fn select_lt(a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    unsafe fn iota() -> Self::V {
        [0.0, 1.0, 2.0, 3.0]
    }
    #[inline(always)]
    unsafe fn sum(v: Self::V) -> f32 {
        (v[0] + v[2]) + (v[1] + v[3])
    }
    #[inline(always)]
    unsafe fn max_lane(v: Self::V) -> f32 {
        v.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn store_sums(p: *mut f32, v: [Self::V; 4]) {
        for (i, v) in v.into_iter().enumerate() {
            p.add(i).write_unaligned(Self::sum(v));
        }
    }
    #[inline(always)]
    unsafe fn nearest_bf16(v: Self::V) -> Self::V {
        v.map(|x| f32::from_bits(x.to_bits().wrapping_add(0x8000) & 0xffff_0000))
    }
    #[inline(always)]
    unsafe fn store_bf16_pairs(p: *mut u16, a: Self::V, b: Self::V) {
        for i in 0..4 {
            let round = |x: f32| (x.to_bits().wrapping_add(0x8000) >> 16) as u16;
            p.add(2 * i).write_unaligned(round(a[i]));
            p.add(2 * i + 1).write_unaligned(round(b[i]));
        }
    }
    #[inline(always)]
    unsafe fn transpose(rows: &[*const f32], dst: *mut f32, ld: usize) {
        for (r, row) in rows.iter().enumerate() {
            for c in 0..4 {
                dst.add(c * ld + r)
                    .write_unaligned(row.add(c).read_unaligned());
            }
        }
    }
    #[inline(always)]
    unsafe fn widen(v: Self::V) -> Self::V {
        v
    }
    #[inline(always)]
    unsafe fn narrow(v: Self::V) -> Self::V {
        v
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> Self::V {
        p.cast::<[u16; 4]>()
            .read_unaligned()
            .map(|bits| f16::from_bits(bits).to_f32_const())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> Self::V {
        p.cast::<[u16; 4]>()
            .read_unaligned()
            .map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::V {
        p.cast::<[u8; 4]>().read().map(dtype::f8e4m3_to_f32)
    }
    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> Self::V {
        p.cast::<[u8; 4]>()
            .read()
            .map(|byte| f16::from_bits(u16::from(byte) << 8).to_f32_const())
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: Self::V) {
        p.cast::<[u16; 4]>()
            .write_unaligned(v.map(|x| f16::from_f32_const(x).to_bits()));
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: Self::V) {
        p.cast::<[u16; 4]>()
            .write_unaligned(v.map(|x| bf16::from_f32_const(x).to_bits()));
    }
    #[inline(always)]
    unsafe fn store_e4m3(p: *mut u8, v: Self::V) {
        p.cast::<[u8; 4]>().write(v.map(dtype::f32_to_f8e4m3));
    }
    #[inline(always)]
    unsafe fn store_e5m2(p: *mut u8, v: Self::V) {
        p.cast::<[u8; 4]>().write(v.map(dtype::f32_to_f8e5m2));
    }
}
