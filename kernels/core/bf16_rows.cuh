// Rows in bf16 that are multiplied in fp16: pairs of their elements as fp32, and the power of two that a row is divided by, so
// that fp16 holds its range. Who divides, and where the power goes, is each kernel's own.
#pragma once
#include "ptx/types.cuh"

namespace folio {

__device__ __forceinline__ float2 unpack_bf16(u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// The power of two that brings the largest number of so many lanes, which are neighbours and all call this, to [1, 2).
// Exponents are kept where both 2^e and 2^-e are normal; a row of zeros stays as it is.
template <int LANES>
__device__ __forceinline__ float power_below(float largest) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, lanes));
    }
    return __uint_as_float(min(max(__float_as_uint(largest) >> 23, 1u), 253u) << 23);
}

// Of such a power of two, exactly.
__device__ __forceinline__ float inverse_of_power(float power) {
    return __uint_as_float((254u << 23) - __float_as_uint(power));
}

}  // namespace folio
