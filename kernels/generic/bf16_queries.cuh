// Queries in bf16 over fp8 caches, in kernels that take their products in fp16: rows of a tile become fp16 there, divided by a
// power of two that brings the largest element to [2^14, 2^15), and the scale of products is multiplied by it. They need no variant
// of their own.
//
// Elements down to 2^-31 of the largest lose nothing, and smaller ones at most 2^-39 of it. So all rows of a tile have one power,
// which costs the loop over keys nothing, unless the largest element of one is below 2^-16 of the tile's: then each has its own.
#pragma once
#include "core/tile.cuh"
#include "params/bf16_queries.h"
#include "core/bf16_rows.cuh"

namespace folio {

// What is written for rows of zeros. Smaller numbers than that are zeros to any scale that a run may have.
constexpr float LEAST_POWER = 0x1p-126f;

__device__ __forceinline__ bool queries_are_bf16(const FolioAttentionParams &p) { return p.flags & FOLIO_QUERIES_BF16; }

__device__ __forceinline__ float largest_of_pair(u32 pair) {
    const float2 x = unpack_bf16(pair);
    return fmaxf(fabsf(x.x), fabsf(x.y));
}

__device__ __forceinline__ u32 narrow_pair(u32 pair, float inverse) {
    const float2 x = unpack_bf16(pair);
    return f16::pack(x.x * inverse, x.y * inverse);
}

// One warp's ROWS rows of BYTES, a multiple of 128, from `first` of a tile on: four at a time, eight lanes each.
template <int ROWS, int BYTES>
struct NarrowedRows {
    static constexpr int LANES = 8, ROWS_OF_PASS = 32 / LANES, COUNT = BYTES / 8 / LANES;
    static_assert(ROWS % ROWS_OF_PASS == 0, "whole passes");

    const u32 tile, first;

    // Calls f(row) for the lane's rows, counted from `first`.
    template <class F>
    static __device__ __forceinline__ void for_each_row(F f) {
#pragma unroll 1
        for (u32 row = threadIdx.x % 32 / LANES; row < ROWS; row += ROWS_OF_PASS) f(row);
    }

    // Four elements of the lane's, half a chunk of a swizzled row.
    __device__ __forceinline__ u32 at(u32 row, int i) const {
        return tile + TileRow<BYTES>::offset(first + row, threadIdx.x % LANES + LANES * (i / 2)) + 8 * (i % 2);
    }

    // What each row would be divided by alone.
    __device__ __forceinline__ void find_powers(float *powers) const {
        for_each_row([&](u32 row) {
            float largest = 0.0f;
#pragma unroll 1
            for (int i = 0; i < COUNT; i++) {
                const uint2 x = ld_shared_v2(at(row, i));
                largest = fmaxf(largest, fmaxf(largest_of_pair(x.x), largest_of_pair(x.y)));
            }
            const float power = power_below<LANES>(0x1p-14f * largest);
            if (threadIdx.x % LANES == 0) powers[first + row] = power;
        });
    }

    // of_all: 0 where each row has its own power.
    __device__ __forceinline__ void divide(const float *powers, float of_all) const {
        for_each_row([&](u32 row) {
            const float inverse = inverse_of_power(of_all > 0.0f ? of_all : powers[first + row]);
#pragma unroll 1
            for (int i = 0; i < COUNT; i++) {
                const uint2 x = ld_shared_v2(at(row, i));
                st_shared_u32(at(row, i), narrow_pair(x.x, inverse));
                st_shared_u32(at(row, i) + 4, narrow_pair(x.y, inverse));
            }
        });
    }
};

// The power that so many rows of a tile, 32 at most, can all have, or 0. All lanes of a warp call this.
__device__ __forceinline__ float power_of_all(const float *powers, u32 rows) {
    const float power = threadIdx.x % 32 < rows ? powers[threadIdx.x % 32] : LEAST_POWER;
    float largest = power;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, lanes));
    const bool is_near = power == LEAST_POWER || power >= 0x1p-16f * largest;
    return __all_sync(FULL_WARP, is_near) ? largest : 0.0f;
}

// The scale of products with rows that were divided. Positive ones stay so: hidden keys are -inf, and 0 times that is NaN.
__device__ __forceinline__ float scale_of_divided(float scale, float power) {
    return scale > 0.0f ? fmaxf(scale * power, LEAST_POWER) : scale * power;
}

// Products with the rows that were divided by their own powers, to those with the rows that were given.
template <class Lane, int M_TILES, int N_TILES>
__device__ __forceinline__ void multiply_rows(float (&s)[M_TILES][N_TILES][4], const float *powers, const Lane &lane) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float power = powers[lane.seldom_tile_row(m, half)];
#pragma unroll
            for (int n = 0; n < N_TILES; n++) s[m][n][2 * half] *= power, s[m][n][2 * half + 1] *= power;
        }
    }
}

}  // namespace folio
