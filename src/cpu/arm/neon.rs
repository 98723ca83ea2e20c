//! The vector type of NEON, which every AArch64 processor has.
//!
//! fp16 is converted by `fcvtl` and `fcvtn`, and bf16 by a shift. fp8 is converted through fp16: these conversions
//! keep subnormal fp16 numbers whatever mode a host is in.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each body is a few intrinsics under the contract stated on the trait"
)]

use crate::cpu::kernels::fp8::{E4M3, E5M2, Fp8};
use crate::cpu::kernels::simd::{Simd, Task};
use std::arch::aarch64::*;
use std::arch::asm;

/// NEON.
pub struct Neon;

/// Four halfs as floats. The intrinsic takes a type that Rust 1.88 lacks.
#[inline(always)]
unsafe fn widen_f16(halfs: uint16x4_t) -> float32x4_t {
    let floats: float32x4_t;
    asm!(
        "fcvtl {floats:v}.4s, {halfs:v}.4h",
        floats = lateout(vreg) floats,
        halfs = in(vreg) halfs,
        options(pure, nomem, nostack, preserves_flags),
    );
    floats
}

/// Four floats rounded to halfs, as [`widen_f16`].
#[inline(always)]
unsafe fn narrow_f16(floats: float32x4_t) -> uint16x4_t {
    let halfs: uint16x4_t;
    asm!(
        "fcvtn {halfs:v}.4h, {floats:v}.4s",
        halfs = lateout(vreg) halfs,
        floats = in(vreg) floats,
        options(pure, nomem, nostack, preserves_flags),
    );
    halfs
}

/// Four bytes in 16-bit lanes.
#[inline(always)]
unsafe fn load_bytes(p: *const u8) -> uint16x4_t {
    let word = u64::from(p.cast::<u32>().read_unaligned());
    vget_low_u16(vmovl_u8(vcreate_u8(word)))
}

/// The low bytes of 32-bit lanes.
#[inline(always)]
unsafe fn store_bytes(p: *mut u8, v: uint32x4_t) {
    let words = vmovn_u32(v);
    let bytes = vmovn_u16(vcombine_u16(words, words));
    let word = vget_lane_u32::<0>(vreinterpret_u32_u8(bytes));
    p.cast::<u32>().write_unaligned(word);
}

/// fp8 bytes in 32-bit lanes: round to nearest even, saturate, keep NaN.
#[inline(always)]
unsafe fn to_fp8(v: float32x4_t, format: &Fp8) -> uint32x4_t {
    let set = |x: i32| vdupq_n_u32(x as u32);
    let bits = vreinterpretq_u32_f32(v);
    let right = vdupq_n_s32(-(format.shift as i32));
    let sign = vandq_u32(vshrq_n_u32::<24>(bits), set(0x80));
    let magnitude = vandq_u32(bits, set(0x7fff_ffff));
    let is_nan = vcgtq_u32(magnitude, set(0x7f80_0000));
    let m = vminq_u32(magnitude, set(format.max));
    let odd = vandq_u32(vshlq_u32(m, right), set(1));
    let half = set((1 << (format.shift - 1)) - 1);
    let rounded = vshlq_u32(vaddq_u32(vaddq_u32(m, half), odd), right);
    let normal = vsubq_u32(rounded, set(format.rebias));
    let aligner = vdupq_n_f32(format.aligner);
    let aligned = vaddq_f32(vreinterpretq_f32_u32(m), aligner);
    let small = vsubq_u32(
        vreinterpretq_u32_f32(aligned),
        vreinterpretq_u32_f32(aligner),
    );
    let is_small = vcltq_u32(m, set(format.min_normal));
    let value = vbslq_u32(is_small, small, normal);
    vorrq_u32(sign, vbslq_u32(is_nan, set(0x7f), value))
}

impl Simd for Neon {
    type V = float32x4_t;
    type Half = Neon;
    const LANES: usize = 4;
    // 24 sums, 4 vectors of B and one of A in 32 registers.
    const STRIP: usize = 4;
    const BLOCK_ROWS: usize = 6;
    const DOT_ROWS: usize = 4;

    #[target_feature(enable = "neon")]
    unsafe fn vectorize<T: Task>(task: &T) -> T::Output {
        task.run::<Neon>()
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        vdupq_n_f32(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> float32x4_t {
        vld1q_f32(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: float32x4_t) {
        vst1q_f32(p, v);
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vaddq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vsubq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vdivq_f32(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }
    // `fmax` and `fmin` give NaN where either is.
    #[inline(always)]
    unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vbslq_f32(vcgtq_f32(a, b), a, b)
    }
    #[inline(always)]
    unsafe fn min(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vbslq_f32(vcltq_f32(a, b), a, b)
    }
    #[inline(always)]
    unsafe fn sqrt(a: float32x4_t) -> float32x4_t {
        vsqrtq_f32(a)
    }
    #[inline(always)]
    unsafe fn split_exponent(x: float32x4_t) -> (float32x4_t, float32x4_t) {
        let x = Self::max(vdupq_n_f32(-127.0), x);
        let n = vrndmq_f32(x);
        (n, vsubq_f32(x, n))
    }
    #[inline(always)]
    unsafe fn scale2(p: float32x4_t, n: float32x4_t) -> float32x4_t {
        let biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
        vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased)))
    }
    #[inline(always)]
    unsafe fn select_lt(
        a: float32x4_t,
        b: float32x4_t,
        x: float32x4_t,
        y: float32x4_t,
    ) -> float32x4_t {
        vbslq_f32(vcltq_f32(a, b), x, y)
    }
    #[inline(always)]
    unsafe fn iota() -> float32x4_t {
        vld1q_f32([0.0, 1.0, 2.0, 3.0].as_ptr())
    }
    #[inline(always)]
    unsafe fn sum(v: float32x4_t) -> f32 {
        vaddvq_f32(v)
    }
    #[inline(always)]
    unsafe fn max_lane(v: float32x4_t) -> f32 {
        vmaxnmvq_f32(v)
    }
    #[inline(always)]
    unsafe fn store_sums(p: *mut f32, [a, b, c, d]: [float32x4_t; 4]) {
        vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
    }
    #[inline(always)]
    unsafe fn nearest_bf16(v: float32x4_t) -> float32x4_t {
        let bits = vaddq_u32(vreinterpretq_u32_f32(v), vdupq_n_u32(0x8000));
        vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff_0000)))
    }
    #[inline(always)]
    unsafe fn store_bf16_pairs(p: *mut u16, a: float32x4_t, b: float32x4_t) {
        let half = vdupq_n_u32(0x8000);
        let a = vaddq_u32(vreinterpretq_u32_f32(a), half);
        let b = vaddq_u32(vreinterpretq_u32_f32(b), half);
        vst1q_u16(p, vreinterpretq_u16_u32(vsriq_n_u32::<16>(b, a)));
    }
    #[inline(always)]
    unsafe fn transpose(rows: &[*const f32], dst: *mut f32, ld: usize) {
        let row = |i: usize| vld1q_f32(rows[i]);
        let even = |a, b| vreinterpretq_f64_f32(vtrn1q_f32(a, b));
        let odd = |a, b| vreinterpretq_f64_f32(vtrn2q_f32(a, b));
        let (a, b, c, d) = (row(0), row(1), row(2), row(3));
        let columns = [
            vtrn1q_f64(even(a, b), even(c, d)),
            vtrn1q_f64(odd(a, b), odd(c, d)),
            vtrn2q_f64(even(a, b), even(c, d)),
            vtrn2q_f64(odd(a, b), odd(c, d)),
        ];
        for (i, column) in columns.into_iter().enumerate() {
            vst1q_f32(dst.add(i * ld), vreinterpretq_f32_f64(column));
        }
    }
    #[inline(always)]
    unsafe fn widen(v: float32x4_t) -> float32x4_t {
        v
    }
    #[inline(always)]
    unsafe fn narrow(v: float32x4_t) -> float32x4_t {
        v
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> float32x4_t {
        widen_f16(vld1_u16(p))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> float32x4_t {
        vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p)))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> float32x4_t {
        let bytes = load_bytes(p);
        let magnitude = vand_u16(bytes, vdup_n_u16(0x7f));
        let sign = vshl_n_u16::<8>(vand_u16(bytes, vdup_n_u16(0x80)));
        let is_nan = vceq_u16(magnitude, vdup_n_u16(0x7f));
        let special = vorr_u16(sign, vand_u16(is_nan, vdup_n_u16(0x7e00)));
        let half = vorr_u16(special, vshl_n_u16::<7>(magnitude));
        vmulq_f32(widen_f16(half), vdupq_n_f32(256.0))
    }
    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> float32x4_t {
        widen_f16(vshl_n_u16::<8>(load_bytes(p)))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: float32x4_t) {
        vst1_u16(p, narrow_f16(v));
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: float32x4_t) {
        let bits = vreinterpretq_u32_f32(v);
        let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let half = vaddq_u32(odd, vdupq_n_u32(0x7fff));
        let rounded = vaddq_u32(bits, half);
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x40_0000));
        let is_number = vceqq_f32(v, v);
        vst1_u16(p, vshrn_n_u32::<16>(vbslq_u32(is_number, rounded, quiet)));
    }
    #[inline(always)]
    unsafe fn store_e4m3(p: *mut u8, v: float32x4_t) {
        store_bytes(p, to_fp8(v, &E4M3));
    }
    #[inline(always)]
    unsafe fn store_e5m2(p: *mut u8, v: float32x4_t) {
        store_bytes(p, to_fp8(v, &E5M2));
    }
}
