// The products of Hopper's warpgroups in e4m3, m64nNk32 with fp32 sums: d = a b, plus d where `accumulate`; both operands
// have their depth contiguous. The unit truncates small addends of a sum: it is not exact to fp32. Beside
// wgmma_products.cuh, whose layout of sums these have. No policy.
//
// An operand a in registers is 64 rows of 32 elements: a[0] has row lane / 4, elements 4 (lane % 4) and the next three;
// a[1] row + 8; a[2] and a[3] the same rows, elements + 16.
#pragma once

#include "ptx/wgmma_products.cuh"

namespace folio {

#define FOLIO_WGMMA_D48 FOLIO_WGMMA_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FOLIO_WGMMA_D68 FOLIO_WGMMA_D64 ", %64, %65, %66, %67"
#define FOLIO_WGMMA_SUMS_48 FOLIO_WGMMA_SUMS_40, FOLIO_WGMMA_SUMS(40)
#define FOLIO_WGMMA_SUMS_68 FOLIO_WGMMA_SUMS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])

// 96 columns, both operands in shared memory.
__device__ __forceinline__ void wgmma_e4m3_ss(float (&d)[48], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.f32.e4m3.e4m3 {" FOLIO_WGMMA_D48 "}, %48, %49, accumulate, 1, 1;\n}"
        : FOLIO_WGMMA_SUMS_48
        : "l"(a), "l"(b), "r"(accumulate));
}

// 136 columns, a in registers.
__device__ __forceinline__ void wgmma_e4m3_rs(float (&d)[68], const u32 *a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %73, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n136k32.f32.e4m3.e4m3 {" FOLIO_WGMMA_D68
        "}, {%68, %69, %70, %71}, %72, accumulate, 1, 1;\n}"
        : FOLIO_WGMMA_SUMS_68
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
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
