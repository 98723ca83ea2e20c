// bf16 queries become fp16 in shared memory where keys are fp16 there. Every row is divided by a power of two, so that its
// range is kept; the softmax multiplies by it.
#pragma once

#include "params/bf16_queries.h"
#include "sm90/prefill/tile.cuh"

namespace folio::prefill {

// The larger of the numbers in either half.
__device__ __forceinline__ u32 max_halves(u32 a, u32 b) {
    u32 y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// A thread of a warpgroup has half of each block of a row's columns, of which the last may end in zeros. 16 bytes at a time:
// chunk `n` of the halves.
class QueryHalf {
public:
    static constexpr u32 CHUNKS = 4 * KEY_COLUMN_BLOCKS;

    __device__ __forceinline__ explicit QueryHalf(u32 queries)
        : row(threadIdx.x % WARPGROUP / 2), first(4 * (threadIdx.x % 2)), queries(queries + row * 128) {}

    __device__ __forceinline__ u32 chunk(u32 n) const {
        return queries + n / 4 * (GROUP_ROWS * 128) + ((first + n % 4 ^ row % 8) << 4);
    }

private:
    u32 row, first, queries;
};

__device__ __forceinline__ u32 narrow_pair(u32 pair, float inverse) {
    return f16::pack(__uint_as_float(pair << 16) * inverse, __uint_as_float(pair & 0xffff0000u) * inverse);
}

// All threads of a warpgroup. `power` gets what the thread's two rows were divided by.
__device__ __forceinline__ void narrow_queries(u32 queries, float (&power)[2]) {
    const QueryHalf half(queries);
    u32 largest = 0;
#pragma unroll 2
    for (u32 n = 0; n < QueryHalf::CHUNKS; ++n) {
        const uint4 x = ld_shared_v4(half.chunk(n));
        largest = max_halves(largest, max_halves(max_halves(x.x & 0x7fff7fffu, x.y & 0x7fff7fffu),
                                                 max_halves(x.z & 0x7fff7fffu, x.w & 0x7fff7fffu)));
    }
    largest = max_halves(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    largest = max(largest & 0xffffu, largest >> 16);
    // The largest comes to [2^14, 2^15). Where it is below 2^-67, as in a row of zeros, the power stays 2^-81: its product
    // with the scale is to be a normal number, or keys that are masked, -inf, times 0 would be NaN.
    const u32 exponent = min(max(largest >> 7, 60u), 253u);
    const float inverse = __uint_as_float(268 - exponent << 23);
#pragma unroll 2
    for (u32 n = 0; n < QueryHalf::CHUNKS; ++n) {
        const uint4 x = ld_shared_v4(half.chunk(n));
        const u32 narrow[4] = {narrow_pair(x.x, inverse), narrow_pair(x.y, inverse), narrow_pair(x.z, inverse),
                               narrow_pair(x.w, inverse)};
        st_shared_v4(half.chunk(n), narrow);
    }
    fence_proxy_async();
    const u32 lane = threadIdx.x % 32;
    const float own = __uint_as_float(exponent - 14 << 23);
#pragma unroll
    for (u32 r = 0; r < 2; ++r) power[r] = __shfl_sync(FULL_WARP, own, 2 * (lane / 4 + 8 * r));
}

}  // namespace folio::prefill
