// Which request a row belongs to, where requests follow each other and only their first rows are known.
#pragma once
#include "ptx/ptx.cuh"

namespace folio {

constexpr u32 WARP = 32;

// The last of `count` requests that begins at or before the row, by a search of the whole warp; first_row(request) says
// where one begins. The lanes look at 32 requests at a time; numbers that do not rise only make the answer wrong.
template <class FirstRow>
__device__ __forceinline__ u32 request_of_row(const FirstRow &first_row, u32 count, i64 row) {
    u32 first = 0;
    while (count > 1) {
        const u32 step = (count + WARP - 1) / WARP, lane = threadIdx.x % WARP;
        const bool begins = lane * step < count && first_row(first + lane * step) <= row;
        const u32 before = max(__popc(__ballot_sync(FULL_WARP, begins)), 1) - 1;
        first += before * step;
        count = min(step, count - before * step);
    }
    return first;
}

// The same of a row of the lane's own, which searches by itself.
template <class FirstRow>
__device__ __forceinline__ u32 request_of_own_row(const FirstRow &first_row, u32 count, i64 row) {
    u32 first = 0;
#pragma unroll 1
    while (count > 1) {
        const u32 half = count / 2;
        const bool is_behind = first_row(first + half) <= row;
        first += is_behind ? half : 0;
        count = is_behind ? count - half : half;
    }
    return first;
}

}  // namespace folio
