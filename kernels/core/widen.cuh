// Elements of a byte or fewer in registers, widened to pairs of fp16 or bf16 numbers. All of it is exact: fp16 and bf16 hold
// integers up to 256 and what e4m3 and e2m1 hold. core/stored.cuh has the same numbers one by one.
#pragma once
#include "core/dtype.cuh"
#include "params/stored.h"

namespace folio {

// a + b, both halves. sm_80 adds bf16 by its fused form only.
template <class T>
__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
    u32 y;
    if constexpr (T::IS_BF16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(0x3f803f80u), "r"(b));
    } else {
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    }
    return y;
}

// Bytes FIRST and SECOND of `a`, or of `b` from 4 on, in the low bytes of halves whose high bytes are of no use.
template <int FIRST, int SECOND>
__device__ __forceinline__ u32 low_bytes(u32 a, u32 b) {
    return __byte_perm(a, b, FIRST | SECOND << 8);
}

// int8 in two's complement is its low seven bits, less 128 where the eighth is set. Seven bits are the mantissa of a bf16
// number from 128 to 255, and the eighth chooses between -128 and -256.
template <class T, int FIRST, int SECOND>
__device__ __forceinline__ u32 widen_i8(u32 bytes) {
    const u32 halves = low_bytes<FIRST, SECOND>(bytes, 0);
    if constexpr (T::IS_BF16) {
        return add_pairs<T>((halves & 0x007f007fu) | 0x43004300u, (halves & 0x00800080u) | 0xc300c300u);
    } else {
        // 1024 + (x + 128) - 1152.
        return add_pairs<T>(((halves & 0x00ff00ffu) ^ 0x00800080u) | 0x64006400u, 0xe480e480u);
    }
}

// Elements 2 I and 2 I + 1 of eight int4: 128 + (x + 8) - 136, and with 1024 in fp16.
template <class T, int I>
__device__ __forceinline__ u32 widen_i4(u32 word) {
    const u32 nibbles = (low_bytes<I, I + 4>(word, word >> 4) & 0x000f000fu) ^ 0x00080008u;
    if constexpr (T::IS_BF16) return add_pairs<T>(nibbles | 0x43004300u, 0xc308c308u);
    return add_pairs<T>(nibbles | 0x64006400u, 0xe408e408u);
}

// The same of e2m1, times a number in both halves. Exponent and mantissa move to their places; a power of two corrects the
// bias.
template <class T, int I>
__device__ __forceinline__ u32 widen_e2m1(u32 word, u32 factor) {
    constexpr u32 SHIFT = T::IS_BF16 ? 6 : 9, BIAS = T::IS_BF16 ? 0x7e807e80u : 0x74007400u;  // 2^126, 2^14
    const u32 nibbles = low_bytes<I, I + 4>(word, word >> 4);
    const u32 number = (nibbles << 12 & 0x80008000u) | (nibbles & 0x00070007u) << SHIFT;
    return T::multiply(T::multiply(number, BIAS), factor);
}

// Sixteen elements, of which `raw` has the bytes: two words where they are nibbles. `factor`: of e2m1.
template <class T, u32 ELEMENT>
__device__ __forceinline__ void widen_16(u32 (&x)[8], const u32 (&raw)[4], u32 factor) {
    if constexpr (ELEMENT == FOLIO_I8) {
#pragma unroll
        for (int i = 0; i < 4; i++) x[2 * i] = widen_i8<T, 0, 1>(raw[i]), x[2 * i + 1] = widen_i8<T, 2, 3>(raw[i]);
    } else if constexpr (ELEMENT == FOLIO_E4M3) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = e4m3::widen<T, 0, 1>(raw[i]), x[2 * i + 1] = e4m3::widen<T, 2, 3>(raw[i]);
        }
    } else if constexpr (ELEMENT == FOLIO_I4) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[4 * i] = widen_i4<T, 0>(raw[i]), x[4 * i + 1] = widen_i4<T, 1>(raw[i]);
            x[4 * i + 2] = widen_i4<T, 2>(raw[i]), x[4 * i + 3] = widen_i4<T, 3>(raw[i]);
        }
    } else {
        static_assert(ELEMENT == FOLIO_E2M1, "elements of a byte or fewer");
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[4 * i] = widen_e2m1<T, 0>(raw[i], factor), x[4 * i + 1] = widen_e2m1<T, 1>(raw[i], factor);
            x[4 * i + 2] = widen_e2m1<T, 2>(raw[i], factor), x[4 * i + 3] = widen_e2m1<T, 3>(raw[i], factor);
        }
    }
}

}  // namespace folio
