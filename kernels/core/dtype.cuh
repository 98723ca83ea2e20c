// Element types as tags with their storage, and conversions to and from fp32; the fp8 formats are the
// OCP ones (e4m3 has no infinities and ends at 448). No CUDA header is used: NVRTC compiles this alone.
#pragma once
#include "ptx/ptx.cuh"

namespace folio {

// fp32 magnitudes rounded to a format of MANTISSA bits whose smallest normal is 2^MIN_EXPONENT, ties to
// even; the caller has already clamped. Below the normal range the steps are equal, so rounding is `rint`
// of a multiple. In both branches a carry out of the mantissa increments the exponent, as it should.
template <int MANTISSA, int MIN_EXPONENT>
__device__ __forceinline__ u32 round_magnitude(float magnitude) {
    const u32 smallest_normal = static_cast<u32>(127 + MIN_EXPONENT) << 23;
    const u32 bits = __float_as_uint(magnitude);
    if (bits < smallest_normal) {
        const float steps = __uint_as_float(static_cast<u32>(127 + MANTISSA - MIN_EXPONENT) << 23);
        return static_cast<u32>(__float2int_rn(magnitude * steps));
    }
    const int dropped = 23 - MANTISSA;
    const u32 rounded = bits + ((1u << (dropped - 1)) - 1) + ((bits >> dropped) & 1);
    return (rounded >> dropped) - (static_cast<u32>(126 + MIN_EXPONENT) << MANTISSA);
}

struct f32 {
    typedef float Storage;
    static constexpr bool IS_FP8 = false;
    static __device__ __forceinline__ float load(Storage x) { return x; }
    static __device__ __forceinline__ Storage store(float x) { return x; }
};

struct f16 {
    typedef u16 Storage;
    static constexpr bool IS_FP8 = false;
    static constexpr bool IS_BF16 = false;
    static __device__ __forceinline__ float load(Storage x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
    }
    static __device__ __forceinline__ Storage store(float x) {
        Storage y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    }
    // Two values in one register, the first in the low half.
    static __device__ __forceinline__ u32 pack(float first, float second) {
        u32 y;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
        return y;
    }
    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_m16n8k16_f16(c, a, b0, b1);
    }
    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
        u32 y;
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
        return y;
    }
};

struct bf16 {
    typedef u16 Storage;
    static constexpr bool IS_FP8 = false;
    static constexpr bool IS_BF16 = true;
    static __device__ __forceinline__ float load(Storage x) { return __uint_as_float(static_cast<u32>(x) << 16); }
    static __device__ __forceinline__ Storage store(float x) {
        Storage y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    }
    static __device__ __forceinline__ u32 pack(float first, float second) {
        u32 y;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(second), "f"(first));
        return y;
    }
    static __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        mma_m16n8k16_bf16(c, a, b0, b1);
    }
    // sm_80 multiplies bf16 by its fused form only; adding -0 changes no product.
    static __device__ __forceinline__ u32 multiply(u32 a, u32 b) {
        u32 y;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000u));
        return y;
    }
};

// Bytes FIRST and SECOND of a register, moved to the high bytes of its 16-bit halves; the rest is zero.
template <int FIRST, int SECOND>
__device__ __forceinline__ u32 spread_bytes(u32 bytes) {
    return __byte_perm(bytes, 0, 0x0404 | FIRST << 4 | SECOND << 12);
}

// spread_bytes, then signs stay and the other bits move down by SHIFT, into an exponent and mantissa of
// the wider type; the factor, a power of two in both halves, corrects the exponent's bias.
template <class T, int SHIFT, u32 FACTOR>
__device__ __forceinline__ u32 rebias(u32 spread) {
    const u32 rest = (0x7f00u >> SHIFT) * 0x00010001u;
    return T::multiply((spread & 0x80008000u) | ((spread >> SHIFT) & rest), FACTOR);
}

struct e4m3 {
    typedef u8 Storage;
    static constexpr bool IS_FP8 = true;
    static __device__ __forceinline__ float load(Storage x) {
        // Sign, exponent and mantissa in their fp32 places; the power of two corrects the bias, exactly for
        // subnormals too.
        if ((x & 0x7f) == 0x7f) return __uint_as_float(0x7fffffffu);
        const u32 bits = (static_cast<u32>(x & 0x80) << 24) | (static_cast<u32>(x & 0x7f) << 20);
        return __uint_as_float(bits) * __uint_as_float((127u + 120u) << 23);
    }
    static __device__ __forceinline__ Storage store(float x) {
        const u32 sign = (__float_as_uint(x) >> 24) & 0x80u;
        if (x != x) return static_cast<Storage>(sign | 0x7f);
        return static_cast<Storage>(sign | round_magnitude<3, -6>(fminf(fabsf(x), 448.0f)));
    }
    // Two bytes of a register as two values of T; exact, as every e4m3 value is one of fp16 and of bf16.
    // NaN bytes read as +-480.
    template <class T, int FIRST, int SECOND>
    static __device__ __forceinline__ u32 widen(u32 bytes) {
        const u32 spread = spread_bytes<FIRST, SECOND>(bytes);
        if constexpr (T::IS_BF16) return rebias<T, 4, 0x7b807b80u>(spread);  // 2^120
        return rebias<T, 1, 0x5c005c00u>(spread);                            // 2^8
    }
};

struct e5m2 {
    typedef u8 Storage;
    static constexpr bool IS_FP8 = true;
    static __device__ __forceinline__ float load(Storage x) { return f16::load(static_cast<u16>(x << 8)); }
    static __device__ __forceinline__ Storage store(float x) {
        const u32 sign = (__float_as_uint(x) >> 24) & 0x80u;
        if (x != x) return static_cast<Storage>(sign | 0x7f);
        return static_cast<Storage>(sign | round_magnitude<2, -14>(fminf(fabsf(x), 57344.0f)));
    }
    // As e4m3::widen; e5m2 is the upper byte of fp16. For bf16, infinities read as +-65536 and NaN as a
    // larger finite number.
    template <class T, int FIRST, int SECOND>
    static __device__ __forceinline__ u32 widen(u32 bytes) {
        const u32 spread = spread_bytes<FIRST, SECOND>(bytes);
        if constexpr (T::IS_BF16) return rebias<T, 3, 0x77807780u>(spread);  // 2^112
        return spread;
    }
};

// --- element types that are known only at run time -------------------------------------------------

__device__ __forceinline__ void store_float(void *base, u32 dtype, i64 index, float x) {
    switch (dtype) {
        case FOLIO_F32: static_cast<float *>(base)[index] = x; break;
        case FOLIO_F16: static_cast<u16 *>(base)[index] = f16::store(x); break;
        case FOLIO_BF16: static_cast<u16 *>(base)[index] = bf16::store(x); break;
        case FOLIO_E4M3: static_cast<u8 *>(base)[index] = e4m3::store(x); break;
        default: static_cast<u8 *>(base)[index] = e5m2::store(x); break;
    }
}

// Elements `index` and `index + 1`, at once where they are aligned together.
__device__ __forceinline__ void store_pair(void *base, u32 dtype, i64 index, float x, float y) {
    const i64 size = dtype == FOLIO_F32 ? 4 : dtype <= FOLIO_BF16 ? 2 : 1;
    u8 *at = static_cast<u8 *>(base) + index * size;
    if (reinterpret_cast<u64>(at) % (2 * size) != 0) {
        store_float(base, dtype, index, x);
        store_float(base, dtype, index + 1, y);
        return;
    }
    switch (dtype) {
        case FOLIO_F32: *reinterpret_cast<float2 *>(at) = make_float2(x, y); break;
        case FOLIO_F16: *reinterpret_cast<u32 *>(at) = f16::pack(x, y); break;
        case FOLIO_BF16: *reinterpret_cast<u32 *>(at) = bf16::pack(x, y); break;
        case FOLIO_E4M3: *reinterpret_cast<u16 *>(at) = static_cast<u16>(e4m3::store(x) | e4m3::store(y) << 8); break;
        default: *reinterpret_cast<u16 *>(at) = static_cast<u16>(e5m2::store(x) | e5m2::store(y) << 8); break;
    }
}

}  // namespace folio
