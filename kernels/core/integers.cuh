// Writing lists and tables of int32 or int64, lengths, sums over a block, and the slots of a request's tokens. Nobody has checked what the
// caller's numbers say: they are clamped where they are read.
#pragma once
#include "core/integer_table.cuh"
#include "core/paged.cuh"
#include "params/index.h"

namespace folio {

constexpr i64 MOST_INT32 = 0x7fffffff;
constexpr u32 LANES = 32, WARPS = FOLIO_THREADS / LANES;

__device__ __forceinline__ void put(const FolioIntegers &table, i64 row, i64 column, i64 value) {
    const i64 at = row * table.stride + column;
    if (table.bytes == 4) {
        static_cast<i32 *>(table.data)[at] = static_cast<i32>(value);
    } else {
        static_cast<i64 *>(table.data)[at] = value;
    }
}

// A number that counts: int32 saturates.
__device__ __forceinline__ void put_count(const FolioIntegers &table, i64 row, i64 column, i64 count) {
    put(table, row, column, table.bytes == 4 ? min(count, MOST_INT32) : count);
}

// A page or a slot: -1 where there is none, or where the type cannot hold it.
__device__ __forceinline__ i64 id_in(const FolioIntegers &table, i64 id) {
    return id < 0 || (table.bytes == 4 && id > MOST_INT32) ? -1 : id;
}

__device__ __forceinline__ void put_id(const FolioIntegers &table, i64 row, i64 column, i64 id) {
    put(table, row, column, id_in(table, id));
}

__device__ __forceinline__ i64 clamp(i64 x, i64 most) { return min(max(x, 0ll), most); }

// A length of a request: from 0 to MOST_INT32, by its halves.
__device__ __forceinline__ u32 length_of(const FolioIntegers &list, u32 b) {
    const bool is_wide = list.bytes == 8;
    const i32 *const number = static_cast<const i32 *>(list.data) + (static_cast<u64>(b) << is_wide);
    const i32 low = number[0];
    if (!is_wide) return max(low, 0);
    const i32 high = number[1];
    return high < 0 ? 0 : high > 0 || low < 0 ? 0x7fffffffu : low;
}

__device__ __forceinline__ i64 length(const FolioIntegers &list, u32 b) { return length_of(list, b); }

// The sum of one number of each lane.
__device__ __forceinline__ i64 warp_sum(i64 value) {
#pragma unroll
    for (u32 i = LANES / 2; i > 0; i /= 2) value += __shfl_xor_sync(FULL_WARP, value, i);
    return value;
}

// The sum of one number of each lane up to this one.
template <class T>
__device__ __forceinline__ T sum_up_to_lane(T value) {
#pragma unroll
    for (u32 i = 1; i < LANES; i *= 2) {
        const T other = __shfl_up_sync(FULL_WARP, value, i);
        if (threadIdx.x % LANES >= i) value += other;
    }
    return value;
}

// The sum of the values of the threads before, and that of all.
struct BlockSums {
    i64 before, all;

    __device__ __forceinline__ explicit BlockSums(i64 value) {
        __shared__ i64 of_warps[WARPS];
        static_assert(WARPS <= LANES, "a warp adds up the sums of all");
        const u32 lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
        const i64 inclusive = sum_up_to_lane(value);
        __syncthreads();  // nobody reads the sums of a call before any more
        if (lane == LANES - 1) of_warps[warp] = inclusive;
        __syncthreads();
        const i64 of_warp = lane < WARPS ? of_warps[lane] : 0;
        before = warp_sum(lane < warp ? of_warp : 0) + inclusive - value;
        all = warp_sum(of_warp);
    }
};

// The row of a request, or -1.
__device__ __forceinline__ i64 row_of(const FolioTokenRows &rows, u32 b) {
    const i64 row = rows.row_ids.data ? get(rows.row_ids, 0, b) : b;
    return row < rows.table.rows ? row : -1;
}

// The most tokens that a row has entries for.
__device__ __forceinline__ i64 tokens_of_row(const FolioTokenRows &rows) {
    return min(rows.table.columns * rows.page_size.divisor, MOST_INT32);
}

// Whether a page exists and int64 can hold its slots: the high half of the product says so, or the sign of a slot.
__device__ __forceinline__ bool has_slots(const FolioTokenRows &rows, i64 page) {
    return page >= 0 && (rows.table.bytes == 4 || __umul64hi(page, rows.page_size.divisor) == 0);
}

// The slot of a token that the row has an entry for, or something negative.
__device__ __forceinline__ i64 slot_of(const FolioTokenRows &rows, i64 row, u32 token) {
    const u32 column = divide(token, rows.page_size);
    const i64 page = get(rows.table, row, column);
    if (!has_slots(rows, page)) return -1;
    const u64 first = static_cast<u64>(page) * rows.page_size.divisor;
    return static_cast<i64>(first + (token - column * rows.page_size.divisor));
}

}  // namespace folio
