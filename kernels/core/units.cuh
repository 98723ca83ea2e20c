// Powers of two that numbers are divided by, so that fp16 holds them: exact, whatever the largest of them is.
#pragma once
#include "ptx/types.cuh"

namespace folio {

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

// The least power of two that is not below x, away from the ends of fp32: divisions by it are exact.
__device__ __forceinline__ float power_of_two_above(float x) {
    const u32 bits = __float_as_uint(fminf(fmaxf(x, 0x1p-100f), 0x1p100f));
    return __uint_as_float((bits + 0x007fffffu) & 0x7f800000u);
}

}  // namespace folio
