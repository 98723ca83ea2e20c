// Fragments of a cache's elements as ldmatrix hands them out, widened in registers to fragments of fp16 numbers. All of
// it is exact.
//
// A lane gets words of a row's bytes: 4 elements of a byte, or 8 of half a byte. Pair j of a word has elements j and
// j + PAIRS: then one shift and one mask bring both to their 16-bit halves. In ldmatrix's transposed words these are a
// column's elements in two neighbouring rows. So with values, pair j is a fragment of columns j, j + PAIRS, ...; with keys
// it is one of two neighbouring dims, if those of the queries are ordered alike (`place_in_queries`).
#pragma once
#include "core/widen.cuh"

namespace folio {

// The logarithm of the pairs of a word: 0 for elements that are multiplied as they are.
__device__ __forceinline__ u32 log2_pairs_of_word(u32 element) {
    return element == FOLIO_I8 || element == FOLIO_E4M3 ? 1 : element == FOLIO_I4 || element == FOLIO_E2M1 ? 2 : 0;
}

// Where element d of a row of keys is in rows of queries. Of 8 PAIRS elements lane p has 2 PAIRS, and products take 16 at a
// time, of which it has pairs 2u and 2u + 1.
__device__ __forceinline__ u32 place_in_queries(u32 d, u32 log2_pairs) {
    const u32 block = d >> (3 + log2_pairs) << (3 + log2_pairs), pair = d & ((1u << log2_pairs) - 1);
    return block + 8 * pair + 2 * (d >> (1 + log2_pairs) & 3) + (d >> log2_pairs & 1);
}

// The column of values that a fragment of outputs has: of its columns `of_fragment`, of fragments `n`.
__device__ __forceinline__ u32 column_of_values(u32 n, u32 of_fragment, u32 log2_pairs) {
    return (n >> log2_pairs << (3 + log2_pairs)) + (of_fragment << log2_pairs) + (n & ((1u << log2_pairs) - 1));
}

// What numbers of an element are multiplied as, counted in what they are. Powers of two that products and outputs take in
// leave one multiplication fewer for e4m3, and one for e2m1 and its scale together. fp16 holds all of it.
constexpr __device__ __forceinline__ float unit_of_numbers(u32 element) {
    return element == FOLIO_E4M3 ? 0x1p-8f : element == FOLIO_E2M1 ? 0x1p-7f : 1.0f;
}

// The scales of two blocks of e2m1, which are the high bytes of both halves, as factors of their elements' bits. What is in
// the low bytes does not matter.
__device__ __forceinline__ u32 e2m1_factors(u32 spread) { return rebias<f16, 1, 0x78007800u>(spread); }  // 2^15

// a * b + c, both halves.
__device__ __forceinline__ u32 multiply_add_pairs(u32 a, u32 b, u32 c) {
    u32 y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    return y;
}

// x & MASK ^ y: one instruction where y is in a register. The compiler takes two.
template <u32 MASK>
__device__ __forceinline__ u32 masked_xor(u32 x, u32 y) {
    u32 z;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(z) : "r"(x), "n"(MASK), "r"(y));
    return z;
}

// Pairs of words of an element as fp16. An integer is the mantissa of a number from 1024 on, with its sign bit inverted.
// What exclusive-ors it there is held in registers.
template <u32 ELEMENT>
struct PairsOf {
    u32 low, high;

    __device__ __forceinline__ PairsOf() : low(kept(0x64086408u)), high(kept(0x64806480u)) {}

    // Pair j of a word. `factors`: of e2m1.
    __device__ __forceinline__ u32 operator()(u32 word, int j, u32 factors) const {
        if constexpr (ELEMENT == FOLIO_I8) {
            return add_pairs<f16>(masked_xor<0x00ff00ffu>(word >> 8 * j, high), 0xe480e480u);  // -1024 - 128
        } else if constexpr (ELEMENT == FOLIO_I4) {
            const u32 nibbles = word >> j / 2 * 8;
            if (j % 2 == 0) return add_pairs<f16>(masked_xor<0x000f000fu>(nibbles, low), 0xe408e408u);  // -1024 - 8
            // A sixteenth, and -64 - 8.
            return multiply_add_pairs(masked_xor<0x00f000f0u>(nibbles, high), 0x2c002c00u, 0xd480d480u);
        } else if constexpr (ELEMENT == FOLIO_E4M3) {
            if (j == 0) return (word << 8 & 0x80008000u) | (word << 7 & 0x3f803f80u);
            return (word & 0x80008000u) | (word >> 1 & 0x3f803f80u);
        } else {
            static_assert(ELEMENT == FOLIO_E2M1, "elements of a byte or fewer");
            const u32 rest = j < 3 ? word << (9 - 4 * j) : word >> 3;
            return f16::multiply((word << (12 - 4 * j) & 0x80008000u) | (rest & 0x0e000e00u), factors);
        }
    }
};

}  // namespace folio
