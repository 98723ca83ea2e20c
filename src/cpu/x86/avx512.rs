//! The vector type of AVX-512 (F, BW, DQ, VL). Conversions are those of `avx2`.
//!
//! It is compiled where the compiler has these intrinsics (`folio_avx512`, from Rust 1.89 on).
#![allow(unsafe_code)]
#![allow(
    clippy::incompatible_msrv,
    reason = "compiled under folio_avx512 only, by compilers that have these intrinsics"
)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each body is a few intrinsics under the contract stated on the trait"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use super::avx2::Avx2;
use crate::cpu::kernels::prefetch::Level;
use crate::cpu::kernels::simd::{Simd, Task};
use std::arch::x86_64::*;

/// AVX-512 F + BW + DQ + VL. With `PREFETCH_L1`, kernels for few query rows prefetch into the first-level cache.
pub struct Avx512With<const PREFETCH_L1: bool>;

pub type Avx512 = Avx512With<false>;
pub type Avx512PrefetchL1 = Avx512With<true>;

const ROUND: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
const FLOOR: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;

impl<const PREFETCH_L1: bool> Simd for Avx512With<PREFETCH_L1> {
    type V = __m512;
    type Half = Avx2;
    const LANES: usize = 16;
    const STRIP: usize = 4;
    const BLOCK_ROWS: usize = 6;
    const DOT_ROWS: usize = 4;
    const LEVEL: Level = match PREFETCH_L1 {
        true => Level::First,
        false => Level::Second,
    };

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    unsafe fn vectorize<T: Task>(task: &T) -> T::Output {
        task.run::<Avx512With<PREFETCH_L1>>()
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        _mm512_storeu_ps(p, v);
    }
    #[inline(always)]
    unsafe fn store_nontemporal(p: *mut f32, v: __m512) {
        _mm512_stream_ps(p, v);
    }
    #[inline(always)]
    unsafe fn store_fence() {
        _mm_sfence();
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        _mm512_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        _mm512_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        _mm512_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        _mm512_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        _mm512_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sqrt(a: __m512) -> __m512 {
        _mm512_sqrt_ps(a)
    }
    #[inline(always)]
    unsafe fn split_exponent(x: __m512) -> (__m512, __m512) {
        // The fraction of -inf is 0, and `scalef` takes the floor of its second operand.
        (x, _mm512_reduce_ps::<FLOOR>(x))
    }
    #[inline(always)]
    unsafe fn clamp_exponent(x: __m512) -> __m512 {
        x
    }
    #[inline(always)]
    unsafe fn scale2(p: __m512, n: __m512) -> __m512 {
        _mm512_scalef_ps(p, n)
    }
    #[inline(always)]
    unsafe fn select_lt(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
        _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x)
    }
    #[inline(always)]
    unsafe fn iota() -> __m512 {
        _mm512_setr_ps(
            0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
        )
    }
    #[inline(always)]
    unsafe fn sum(v: __m512) -> f32 {
        let high = _mm512_extractf32x8_ps::<1>(v);
        Avx2::sum(_mm256_add_ps(_mm512_castps512_ps256(v), high))
    }
    #[inline(always)]
    unsafe fn max_lane(v: __m512) -> f32 {
        let high = _mm512_extractf32x8_ps::<1>(v);
        Avx2::max_lane(_mm256_max_ps(_mm512_castps512_ps256(v), high))
    }
    #[inline(always)]
    unsafe fn store_sums(p: *mut f32, [a, b, c, d]: [__m512; 4]) {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
        let v = _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
        let v = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        _mm_storeu_ps(p, v);
    }
    #[inline(always)]
    unsafe fn nearest_bf16(v: __m512) -> __m512 {
        let bits = _mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000));
        let high = _mm512_set1_epi32(0xffff_0000u32 as i32);
        _mm512_castsi512_ps(_mm512_and_si512(bits, high))
    }
    #[inline(always)]
    unsafe fn store_rounded_bf16(p: *mut u16, v: __m512) {
        let high = _mm512_srli_epi32::<16>(_mm512_castps_si512(v));
        _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(high));
    }
    #[inline(always)]
    unsafe fn store_bf16_pairs(p: *mut u16, a: __m512, b: __m512) {
        let half = _mm512_set1_epi32(0x8000);
        let a = _mm512_add_epi32(_mm512_castps_si512(a), half);
        let b = _mm512_add_epi32(_mm512_castps_si512(b), half);
        let high = _mm512_and_si512(b, _mm512_set1_epi32(0xffff_0000u32 as i32));
        let pairs = _mm512_or_si512(_mm512_srli_epi32::<16>(a), high);
        _mm512_storeu_si512(p.cast(), pairs);
    }
    #[inline(always)]
    unsafe fn transpose(rows: &[*const f32], dst: *mut f32, ld: usize) {
        // Four rows at a time, within 128-bit lanes; then the lanes are combined.
        let mut quads = [[_mm512_setzero_ps(); 4]; 4];
        for (group, quad) in quads.iter_mut().enumerate() {
            let row = |i: usize| _mm512_loadu_ps(rows[group * 4 + i]);
            let (a, b, c, d) = (row(0), row(1), row(2), row(3));
            let ab0 = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
            let ab1 = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
            let cd0 = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
            let cd1 = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
            quad[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab0, cd0));
            quad[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab0, cd0));
            quad[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab1, cd1));
            quad[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab1, cd1));
        }
        for c in 0..4 {
            let even0 = _mm512_shuffle_f32x4::<0x88>(quads[0][c], quads[1][c]);
            let odd0 = _mm512_shuffle_f32x4::<0xdd>(quads[0][c], quads[1][c]);
            let even1 = _mm512_shuffle_f32x4::<0x88>(quads[2][c], quads[3][c]);
            let odd1 = _mm512_shuffle_f32x4::<0xdd>(quads[2][c], quads[3][c]);
            let at = |lane: usize| dst.add((4 * lane + c) * ld);
            _mm512_storeu_ps(at(0), _mm512_shuffle_f32x4::<0x88>(even0, even1));
            _mm512_storeu_ps(at(1), _mm512_shuffle_f32x4::<0x88>(odd0, odd1));
            _mm512_storeu_ps(at(2), _mm512_shuffle_f32x4::<0xdd>(even0, even1));
            _mm512_storeu_ps(at(3), _mm512_shuffle_f32x4::<0xdd>(odd0, odd1));
        }
    }
    #[inline(always)]
    unsafe fn widen(v: __m256) -> __m512 {
        _mm512_zextps256_ps512(v)
    }
    #[inline(always)]
    unsafe fn narrow(v: __m512) -> __m256 {
        _mm512_castps512_ps256(v)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
        let magnitude = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7f));
        let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(bytes, _mm256_set1_epi16(0x80)));
        let is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
        let nan = _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00));
        let special = _mm256_or_si256(sign, nan);
        let half = _mm256_or_si256(special, _mm256_slli_epi16::<7>(magnitude));
        _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
    }
    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> __m512 {
        let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
        _mm512_cvtph_ps(_mm256_slli_epi16::<8>(bytes))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m512) {
        _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<ROUND>(v));
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: __m512) {
        let bits = _mm512_castps_si512(v);
        let high = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
        let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
        let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
        let words = _mm512_mask_blend_epi32(is_nan, rounded, quiet);
        _mm256_storeu_si256(p.cast(), _mm512_cvtepi32_epi16(words));
    }
    #[inline(always)]
    unsafe fn store_e4m3(p: *mut u8, v: __m512) {
        Avx2::store_e4m3(p, _mm512_castps512_ps256(v));
        Avx2::store_e4m3(p.add(8), _mm512_extractf32x8_ps::<1>(v));
    }
    #[inline(always)]
    unsafe fn store_e5m2(p: *mut u8, v: __m512) {
        Avx2::store_e5m2(p, _mm512_castps512_ps256(v));
        Avx2::store_e5m2(p.add(8), _mm512_extractf32x8_ps::<1>(v));
    }
}
