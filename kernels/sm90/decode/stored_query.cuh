// A query row over a cache in another form than plain rows, as operands: fp16 numbers in the order of the cache's elements,
// times the scales of the keys' channels where the form has them. One set of kernels serves queries in fp16 and bf16, since
// both are divided by a power of two.
#pragma once

#include "sm90/decode/work.cuh"

namespace folio::decode {

struct StoredQuery {
    float unit;  // what the row was divided by
    float bias;  // what zero points add to its products, in that unit

    // Lane 4g + i reads and writes its part of row g. Columns beyond the problem's are zeros.
    __device__ __forceinline__ StoredQuery(NarrowFragment (&fragments)[QUERY_PARTS][QUERY_STEPS],
                                           const FolioStoredDecodeParams &params, const Item &item, int column_tile,
                                           u32 lane)
        : bias(0.0f) {
        const FolioRows &q = params.attention.q;
        const PackedRow packed = packed_row(params, item, 8 * (column_tile % ROW_TILES) + lane / 4);
        const u32 kv_head = item.kv_head + column_tile / ROW_TILES;
        const i64 token = static_cast<i64>(item.work.q_token) + packed.query;
        const i64 head = static_cast<i64>(kv_head) * params.group_size + packed.head;
        const u16 *row = static_cast<const u16 *>(q.data) + token * q.stride_token + head * q.stride_head;
        float x[OF_LANE];
        for_fours(
            params, lane,
            [&](int n, u32 column) {
                load_four(x + n, row + column, params.bf16_queries);
                if constexpr (CHANNEL_SCALES) {
                    const FolioStoredTensor &k = params.cache.k;
                    const float *scales = static_cast<const float *>(k.scales) + kv_head * k.scales_head + column;
#pragma unroll
                    for (int j = 0; j < 4; ++j) x[n + j] *= scales[j];
                }
            },
            [&](int n) { x[n] = x[n + 1] = x[n + 2] = x[n + 3] = 0.0f; });
        divide(x);
        pack(fragments, x);
        if constexpr (ZERO_POINTS) {
            const float *zeros = params.cache.k.zero_points + kv_head * params.cache.k.zero_points_head;
            // Of what is multiplied, so that its error goes by q . k and not by what cancels.
            for_fours(
                params, lane,
                [&](int n, u32 column) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) bias += as_multiplied(x[n + j]) * zeros[column + j];
                },
                [](int) {});
            bias += __shfl_xor_sync(FULL_WARP, bias, 1);
            bias += __shfl_xor_sync(FULL_WARP, bias, 2);
        }
    }

private:
    // Neighbours that a lane gets of a chunk, and its part of a row.
    static constexpr int NEIGHBOURS = 32 / Op::BITS, OF_LANE = HEAD_DIM_QK / 4;
    // The row's largest element is brought to [1, 2), or, where there is a second number for the rest of the first, to
    // [2^13, 2^14): the rest of small elements is not denormal then. Where keys are multiplied in a smaller unit, it is brought to
    // the inverse of that.
    static constexpr u32 LIFT = QUERY_PARTS == 2 ? 13 : UNIT_LOG2;

    // Calls `there` with every fourth index of the lane's part and its column, `beyond` with those past the row's end.
    template <class There, class Beyond>
    static __device__ __forceinline__ void for_fours(const FolioStoredDecodeParams &params, u32 lane, There there,
                                                     Beyond beyond) {
#pragma unroll
        for (int n = 0; n < OF_LANE; n += 4) {
            const u32 column = (n / NEIGHBOURS * 4 + (lane & 3)) * NEIGHBOURS + n % NEIGHBOURS;
            if (column < params.head_dim_qk) {
                there(n, column);
            } else {
                beyond(n);
            }
        }
    }

    static __device__ __forceinline__ void load_four(float *x, const u16 *from, bool is_bf16) {
        const uint2 four = *reinterpret_cast<const uint2 *>(from);
        const u32 pairs[2] = {four.x, four.y};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u16 bits = static_cast<u16>(pairs[i / 2] >> 16 * (i % 2));
            x[i] = is_bf16 ? bf16::load(bits) : f16::load(bits);
        }
    }

    __device__ __forceinline__ void divide(float (&x)[OF_LANE]) {
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n) largest = fmaxf(largest, fabsf(x[n]));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
        // Exponents are kept where both 2^e and 2^-e are normal; a row of zeros stays zeros.
        const u32 exponent = min(max(__float_as_uint(largest) >> 23, 1 + LIFT), 253u) - LIFT;
        unit = __uint_as_float((exponent + UNIT_LOG2) << 23);
        const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
        for (int n = 0; n < OF_LANE; ++n) x[n] *= inverse;
    }

    // What is left of a number behind its first part.
    static __device__ __forceinline__ float rest(float x) { return x - f16::load(f16::store(x)); }

    static __device__ __forceinline__ float as_multiplied(float x) {
        return f16::load(f16::store(x)) + f16::load(f16::store(rest(x)));
    }

    // Step k has neighbours 2 r and 2 r + 1 in register r where elements are bytes, n and n + 4 where they are nibbles.
    static __device__ __forceinline__ void pack(NarrowFragment (&fragments)[QUERY_PARTS][QUERY_STEPS],
                                                const float (&x)[OF_LANE]) {
#pragma unroll
        for (int k = 0; k < QUERY_STEPS; ++k) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int first = Op::BITS == 8 ? 4 * k + 2 * r : k / 2 * 8 + k % 2 * 2 + r;
                const int second = first + (Op::BITS == 8 ? 1 : 4);
                fragments[0][k].r[r] = f16::pack(x[first], x[second]);
                if constexpr (QUERY_PARTS == 2) fragments[1][k].r[r] = f16::pack(rest(x[first]), rest(x[second]));
            }
        }
    }
};

}  // namespace folio::decode
