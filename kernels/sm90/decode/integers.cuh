// Elements of caches that are no floating-point numbers, int8 and pairs of int4, as the decode kernel sees them: storage, and
// how registers of them become pairs of fp16 numbers. fp16 holds all of them exactly. core/widen.cuh widens to rows of a
// tile; here elements may come in any order that queries and outputs follow.
#pragma once

#include "core/cache.cuh"

namespace folio {

struct i8 {
    typedef u8 Storage;
    static constexpr bool IS_FP8 = false;
};

// Two of them are a unit of storage, the first in the low bits.
struct i4 {
    typedef u8 Storage;
    static constexpr bool IS_FP8 = false;
};

// Rows of pairs.
template <class Element>
struct PairRows : CacheRows<Element> {
    static constexpr __device__ __forceinline__ u32 row_bytes(u32 dim) { return dim / 2; }
};

template <class Element>
struct RowsOf {
    typedef CacheRows<Element> Type;
};
template <>
struct RowsOf<i4> {
    typedef PairRows<i4> Type;
};

__device__ __forceinline__ u32 add_f16x2(u32 a, u32 b) {
    u32 y;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// (x & mask) ^ flips, in one instruction, which the compiler does not make of it.
__device__ __forceinline__ u32 and_xor(u32 x, u32 mask, u32 flips) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(y) : "r"(x), "r"(mask), "r"(flips));
    return y;
}

// Four int8 as two pairs. x + 128 in the mantissa of 1024 is 1152 + x.
__device__ __forceinline__ void widen_bytes(u32 bytes, u32 &low_pair, u32 &high_pair) {
    const u32 biased = bytes ^ 0x80808080u;
    low_pair = add_f16x2(__byte_perm(biased, 0x64646464u, 0x4140), 0xe480e480u);
    high_pair = add_f16x2(__byte_perm(biased, 0x64646464u, 0x4342), 0xe480e480u);
}

// Eight int4 as four pairs: elements n and n + 4. In the mantissa of 1024, x + 8 is 1032 + x in the low four bits, and
// 1024 + 16 (x + 8) in the next four.
__device__ __forceinline__ void widen_nibbles(u32 nibbles, u32 (&pairs)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const u32 word = nibbles >> 8 * half;
        pairs[2 * half] = add_f16x2(and_xor(word, 0x000f000fu, 0x64086408u), 0xe408e408u);
        pairs[2 * half + 1] =
            fma_f16x2(and_xor(word, 0x00f000f0u, 0x64806480u), 0x2c002c00u, 0xd480d480u);  // / 16 - 72
    }
}

}  // namespace folio
