//! The vector type of AVX2, with FMA and F16C.
//!
//! fp16 is converted by `vcvtph2ps`, and bf16 by a shift. fp8 is converted through fp16, which works in the
//! denormals-are-zero mode of a host too.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "each body is a few intrinsics under the contract stated on the trait"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use crate::cpu::kernels::fp8::{E4M3, E5M2, Fp8};
use crate::cpu::kernels::simd::{Simd, Task};
use std::arch::x86_64::*;

/// AVX2 + FMA + F16C.
pub struct Avx2;

/// fp8 bytes in 32-bit lanes: round to nearest even, saturate, keep NaN.
#[inline(always)]
unsafe fn fp8_256(v: __m256, format: &Fp8) -> __m256i {
    let bits = _mm256_castps_si256(v);
    let set = |x: i32| _mm256_set1_epi32(x);
    let count = _mm_cvtsi32_si128(format.shift as i32);
    let sign = _mm256_and_si256(_mm256_srli_epi32::<24>(bits), set(0x80));
    let magnitude = _mm256_and_si256(bits, set(0x7fff_ffff));
    let is_nan = _mm256_cmpgt_epi32(magnitude, set(0x7f80_0000));
    let m = _mm256_min_epi32(magnitude, set(format.max));
    let odd = _mm256_and_si256(_mm256_srl_epi32(m, count), set(1));
    let half = set((1 << (format.shift - 1)) - 1);
    let rounded = _mm256_srl_epi32(_mm256_add_epi32(_mm256_add_epi32(m, half), odd), count);
    let normal = _mm256_sub_epi32(rounded, set(format.rebias));
    let aligner = _mm256_set1_ps(format.aligner);
    let aligned = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(m), aligner));
    let small = _mm256_sub_epi32(aligned, _mm256_castps_si256(aligner));
    let is_small = _mm256_cmpgt_epi32(set(format.min_normal), m);
    let value = _mm256_blendv_epi8(normal, small, is_small);
    _mm256_or_si256(sign, _mm256_blendv_epi8(value, set(0x7f), is_nan))
}

#[inline(always)]
unsafe fn store_bytes_256(p: *mut u8, v: __m256i) {
    let words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    _mm_storel_epi64(p.cast(), _mm_packus_epi16(words, words));
}

impl Simd for Avx2 {
    type V = __m256;
    type Half = Avx2;
    const LANES: usize = 8;
    const STRIP: usize = 2;
    const BLOCK_ROWS: usize = 6;
    const DOT_ROWS: usize = 2;

    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn vectorize<T: Task>(task: &T) -> T::Output {
        task.run::<Avx2>()
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        _mm256_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        _mm256_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m256) {
        _mm256_storeu_ps(p, v);
    }
    #[inline(always)]
    unsafe fn store_nontemporal(p: *mut f32, v: __m256) {
        _mm256_stream_ps(p, v);
    }
    #[inline(always)]
    unsafe fn store_fence() {
        _mm_sfence();
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        _mm256_add_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: __m256, b: __m256) -> __m256 {
        _mm256_sub_ps(a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        _mm256_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn div(a: __m256, b: __m256) -> __m256 {
        _mm256_div_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        _mm256_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn max(a: __m256, b: __m256) -> __m256 {
        _mm256_max_ps(a, b)
    }
    #[inline(always)]
    unsafe fn min(a: __m256, b: __m256) -> __m256 {
        _mm256_min_ps(a, b)
    }
    #[inline(always)]
    unsafe fn sqrt(a: __m256) -> __m256 {
        _mm256_sqrt_ps(a)
    }
    #[inline(always)]
    unsafe fn split_exponent(x: __m256) -> (__m256, __m256) {
        let x = _mm256_max_ps(_mm256_set1_ps(-127.0), x);
        let n = _mm256_floor_ps(x);
        (n, _mm256_sub_ps(x, n))
    }
    #[inline(always)]
    unsafe fn scale2(p: __m256, n: __m256) -> __m256 {
        let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
        _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased)))
    }
    #[inline(always)]
    unsafe fn select_lt(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
        _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    unsafe fn iota() -> __m256 {
        _mm256_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    }
    #[inline(always)]
    unsafe fn sum(v: __m256) -> f32 {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
    #[inline(always)]
    unsafe fn max_lane(v: __m256) -> f32 {
        let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
    }
    #[inline(always)]
    unsafe fn store_sums(p: *mut f32, [a, b, c, d]: [__m256; 4]) {
        let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let (ab, cd) = (_mm256_castps_pd(ab), _mm256_castps_pd(cd));
        let low = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
        let v = _mm256_add_ps(low, _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        _mm_storeu_ps(p, v);
    }
    #[inline(always)]
    unsafe fn nearest_bf16(v: __m256) -> __m256 {
        let bits = _mm256_add_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(0x8000));
        let high = _mm256_set1_epi32(0xffff_0000u32 as i32);
        _mm256_castsi256_ps(_mm256_and_si256(bits, high))
    }
    #[inline(always)]
    unsafe fn store_bf16_pairs(p: *mut u16, a: __m256, b: __m256) {
        let half = _mm256_set1_epi32(0x8000);
        let a = _mm256_add_epi32(_mm256_castps_si256(a), half);
        let b = _mm256_add_epi32(_mm256_castps_si256(b), half);
        let high = _mm256_and_si256(b, _mm256_set1_epi32(0xffff_0000u32 as i32));
        let pairs = _mm256_or_si256(_mm256_srli_epi32::<16>(a), high);
        _mm256_storeu_si256(p.cast(), pairs);
    }
    #[inline(always)]
    unsafe fn transpose(rows: &[*const f32], dst: *mut f32, ld: usize) {
        // Four rows at a time, within 128-bit lanes; then the lanes are combined.
        let mut quads = [[_mm256_setzero_ps(); 4]; 2];
        for (group, quad) in quads.iter_mut().enumerate() {
            let row = |i: usize| _mm256_loadu_ps(rows[group * 4 + i]);
            let (a, b, c, d) = (row(0), row(1), row(2), row(3));
            let ab0 = _mm256_castps_pd(_mm256_unpacklo_ps(a, b));
            let ab1 = _mm256_castps_pd(_mm256_unpackhi_ps(a, b));
            let cd0 = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
            let cd1 = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
            quad[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab0, cd0));
            quad[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab0, cd0));
            quad[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab1, cd1));
            quad[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab1, cd1));
        }
        for c in 0..4 {
            let (low, high) = (quads[0][c], quads[1][c]);
            let left = _mm256_permute2f128_ps::<0x20>(low, high);
            let right = _mm256_permute2f128_ps::<0x31>(low, high);
            _mm256_storeu_ps(dst.add(c * ld), left);
            _mm256_storeu_ps(dst.add((4 + c) * ld), right);
        }
    }
    #[inline(always)]
    unsafe fn widen(v: __m256) -> __m256 {
        v
    }
    #[inline(always)]
    unsafe fn narrow(v: __m256) -> __m256 {
        v
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m256 {
        _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m256 {
        let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        let bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()));
        let magnitude = _mm_and_si128(bytes, _mm_set1_epi16(0x7f));
        let sign = _mm_slli_epi16::<8>(_mm_and_si128(bytes, _mm_set1_epi16(0x80)));
        let is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
        let nan = _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00));
        let half = _mm_or_si128(_mm_or_si128(sign, nan), _mm_slli_epi16::<7>(magnitude));
        _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0))
    }
    #[inline(always)]
    unsafe fn load_e5m2(p: *const u8) -> __m256 {
        let bytes = _mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()));
        _mm256_cvtph_ps(_mm_slli_epi16::<8>(bytes))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u16, v: __m256) {
        _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v));
    }
    #[inline(always)]
    unsafe fn store_bf16(p: *mut u16, v: __m256) {
        let bits = _mm256_castps_si256(v);
        let high = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
        let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
        let words = _mm256_blendv_epi8(rounded, quiet, is_nan);
        let low = _mm256_castsi256_si128(words);
        let packed = _mm_packus_epi32(low, _mm256_extracti128_si256::<1>(words));
        _mm_storeu_si128(p.cast(), packed);
    }
    #[inline(always)]
    unsafe fn store_e4m3(p: *mut u8, v: __m256) {
        store_bytes_256(p, fp8_256(v, &E4M3));
    }
    #[inline(always)]
    unsafe fn store_e5m2(p: *mut u8, v: __m256) {
        store_bytes_256(p, fp8_256(v, &E5M2));
    }
}
