// The products of Hopper's warpgroups in e4m3, m64nNk32 with fp32 sums: d = a b, plus d where `accumulate`; both operands
// have their depth contiguous. The unit truncates small addends of a sum: it is not exact to fp32. Beside
// wgmma_products.cuh, whose layout of sums these have. No policy.
//
// An operand a in registers is 64 rows of 32 elements: a[0] has row lane / 4, elements 4 (lane % 4) and the next three;
// a[1] row + 8; a[2] and a[3] the same rows, elements + 16.
#pragma once

#include "ptx/wgmma_products.cuh"

namespace folio {

#define FOLIO_WGMMA_D36 FOLIO_WGMMA_D32 ", %32, %33, %34, %35"
#define FOLIO_WGMMA_D68 FOLIO_WGMMA_D64 ", %64, %65, %66, %67"
#define FOLIO_WGMMA_SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FOLIO_WGMMA_SUMS_36 FOLIO_WGMMA_SUMS_32, FOLIO_WGMMA_SUMS_4(32)
#define FOLIO_WGMMA_SUMS_68 FOLIO_WGMMA_SUMS_64, FOLIO_WGMMA_SUMS_4(64)

#define FOLIO_WGMMA_E4M3_TEXT(N, D, PREDICATE, OPERANDS)                                         \
    "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #PREDICATE                            \
    ", 0;\n"                                                                                     \
    "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FOLIO_WGMMA_D##D "}, " OPERANDS \
                                                                                  ", accumulate, 1, 1;\n}"

// N columns, D = N / 2 sums, and the numbers behind D. Both operands in shared memory.
#define FOLIO_WGMMA_E4M3_SS(N, D, D1, D2)                                                       \
    __device__ __forceinline__ void wgmma_e4m3_ss(float(&d)[D], u64 a, u64 b, int accumulate) { \
        asm volatile(FOLIO_WGMMA_E4M3_TEXT(N, D, D2, "%" #D ", %" #D1)                          \
                     : FOLIO_WGMMA_SUMS_##D                                                     \
                     : "l"(a), "l"(b), "r"(accumulate));                                        \
    }

// The same with a in registers.
#define FOLIO_WGMMA_E4M3_RS(N, D, D1, D2, D3, D4, D5)                                                  \
    __device__ __forceinline__ void wgmma_e4m3_rs(float(&d)[D], const u32 *a, u64 b, int accumulate) { \
        asm volatile(FOLIO_WGMMA_E4M3_TEXT(N, D, D5, "{%" #D ", %" #D1 ", %" #D2 ", %" #D3 "}, %" #D4) \
                     : FOLIO_WGMMA_SUMS_##D                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));           \
    }

FOLIO_WGMMA_E4M3_SS(64, 32, 33, 34)
FOLIO_WGMMA_E4M3_SS(96, 48, 49, 50)
FOLIO_WGMMA_E4M3_SS(128, 64, 65, 66)
FOLIO_WGMMA_E4M3_RS(72, 36, 37, 38, 39, 40, 41)
FOLIO_WGMMA_E4M3_RS(128, 64, 65, 66, 67, 68, 69)
FOLIO_WGMMA_E4M3_RS(136, 68, 69, 70, 71, 72, 73)

// A tile in shared memory with the 64-byte swizzle: 512-byte atoms of 8 rows x 64 bytes. `stride` leads to the next 8 rows,
// in bytes.
__device__ __forceinline__ u64 wgmma_descriptor_64(u32 address, u32 stride) {
    return (address & 0x3ffff) >> 4 | 1ull << 16 | static_cast<u64>(stride >> 4) << 32 | 2ull << 62;
}

// Four numbers rounded to e4m3, the first in the low byte.
__device__ __forceinline__ u32 pack_e4m3(float a, float b, float c, float d) {
    u32 bytes;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(bytes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return bytes;
}

}  // namespace folio
