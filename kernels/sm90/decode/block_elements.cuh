// Elements of caches in e2m1, with a scale in e4m3 for each sixteen, as the decode kernel sees them: storage, and how registers of
// them become pairs of fp16 numbers, times their scale. All of it is exact.
#pragma once

#include "sm90/decode/integers.cuh"

namespace folio {

// Two of them are a unit of storage, the first in the low bits.
struct e2m1 {
    typedef u8 Storage;
    static constexpr bool IS_FP8 = false;
};
template <>
struct RowsOf<e2m1> {
    typedef PairRows<e2m1> Type;
};

__device__ __forceinline__ u32 multiply_f16x2(u32 a, u32 b) {
    u32 y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Multipliers that shift, which the compiler does not know: it would make shifts of them, on the pipe for logic, which has the most
// to do already. All lanes are to make them together.
struct E2m1Shifts {
    u32 by_1, by_9;

    __device__ __forceinline__ E2m1Shifts() {
        const u32 ones = __ballot_sync(FULL_WARP, true);
        by_1 = ones & 1u << 1, by_9 = ones & 1u << 9;
    }
};

// Twice the low half and twice the high half of a pair, which products take without an instruction.
__device__ __forceinline__ void both_halves(u32 pair, u32 &low, u32 &high) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\nmov.b32 %0, {l, l};\nmov.b32 %1, {h, h};\n}"
        : "=r"(low), "=r"(high)
        : "r"(pair));
}

// Two halves that hold an element's bits from bit 9 on, and nothing up to bit 15 above them: exponent and mantissa are in
// their places, and adding 7 at bit 12, where the sign is, carries it to bit 15. What was there without a sign is masked.
__device__ __forceinline__ u32 signed_halves(u32 bits, u32 shift) { return (bits * shift + 0x70007000u) & 0x8e008e00u; }

// Eight e2m1 as four pairs, elements n and n + 4, in units of 2^-14 and times `factor`: 2^-24 is the least product.
__device__ __forceinline__ void widen_e2m1(u32 nibbles, u32 factor, const E2m1Shifts &shifts, u32 (&pairs)[4]) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const u32 bits = nibbles >> 4 * odd & 0x0f0f0f0fu;
        pairs[odd] = multiply_f16x2(signed_halves(bits, shifts.by_9), factor);
        pairs[2 + odd] = multiply_f16x2(signed_halves(bits, shifts.by_1), factor);
    }
}

}  // namespace folio
