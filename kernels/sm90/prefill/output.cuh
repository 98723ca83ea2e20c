// The end of a tile in the Hopper prefill kernel: from accumulators to rows of o and lse, or to partial results. For
// those the combine kernel adds the sink and the value scale, unless that is a request's.
#pragma once

#include "sm90/prefill/softmax.cuh"

namespace folio::prefill {

// Transposes 4 x 4 words within each quad of lanes: x[j] of lane i becomes x[i] of lane j.
__device__ __forceinline__ void quad_transpose(u32 (&x)[4], u32 lane) {
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(FULL_WARP, odd ? x[i] : x[i + 1], 1);
        (odd ? x[i] : x[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 other = __shfl_xor_sync(FULL_WARP, upper ? x[i] : x[i + 2], 2);
        (upper ? x[i] : x[i + 2]) = other;
    }
}

// One row (r = 0 or 1 of the thread's two), `columns` of it, in 16-byte pieces. Every lane takes part; `keep` says who
// stores.
template <class T, int N>
__device__ __forceinline__ void store_row(const float (&o)[N], int r, float weight, u16 *row, u32 columns, bool keep,
                                          u32 lane) {
#pragma unroll
    for (int j = 0; j < N; j += 16) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (j + 4 * i >= N) {
                x[i] = 0;
                continue;
            }
            x[i] = T::pack(o[j + 4 * i + 2 * r] * weight, o[j + 4 * i + 2 * r + 1] * weight);
        }
        quad_transpose(x, lane);
        const u32 column = 2 * j + 8 * (lane % 4);
        if (keep && column < columns) *reinterpret_cast<uint4 *>(row + column) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

template <int N>
__device__ __forceinline__ void store_float_row(const float (&o)[N], int r, float weight, float *row, u32 columns,
                                                u32 lane) {
#pragma unroll
    for (int j = 0; j < N; j += 4) {
        if (2 * j >= columns) return;
        *reinterpret_cast<float2 *>(row + 2 * j + 2 * (lane % 4)) =
            make_float2(o[j + 2 * r] * weight, o[j + 2 * r + 1] * weight);
    }
}

// What the rows of a tile are multiplied by.
__device__ __forceinline__ float output_scale(const FolioAttentionParams &params, const Tile &tile, bool whole) {
    if (!whole) return part_scale(params, tile.kv_head, tile.request.index);
    if (params.flags & FOLIO_RUN_ROUNDED_LATER) return 1.0f;
    return params.v_scale * value_scale(params, tile.kv_head, tile.request.index);
}

template <int N, class Rows>
__device__ __forceinline__ void store_output(const FolioAttentionParams &params, u32 head_dim_vo, const Tile &tile,
                                             const float (&o)[N], const Rows &rows) {
    const u32 lane = threadIdx.x % 32;
    const bool whole = tile.partial == FOLIO_NO_PARTIAL;
    const float v_scale = output_scale(params, tile, whole);
    u32 token[2], head[2];
    float weight[2], lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = first_row() + 8 * r;
        token[r] = tile.stored_position_of(row);
        head[r] = tile.head_of(row);
        const float sink = whole && params.sinks != nullptr ? params.sinks[head[r]] * LOG2_E : minus_infinity();
        const RowEnd end(rows.row_max[r], quad_sum(rows.sum[r]), sink);
        weight[r] = end.weight * v_scale;
        lse[r] = end.lse;
    }
    if (whole) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const bool keep = token[r] < tile.num_tokens;
            const i64 q_row = tile.token + token[r];
            auto *row = static_cast<Result::Storage *>(params.o.data) + q_row * params.o.stride_token +
                        head[r] * params.o.stride_head;
            if constexpr (sizeof(*row) == 4) {
                if (keep) store_float_row(o, r, weight[r], row, head_dim_vo, lane);
            } else {
                store_row<Result>(o, r, weight[r], row, head_dim_vo, keep, lane);
            }
            if (keep && lane % 4 == 0 && params.lse != nullptr) {
                params.lse[q_row * params.lse_stride_token + head[r] * params.lse_stride_head] =
                    params.flags & FOLIO_RUN_LSE_BASE_2 ? lse[r] : lse[r] * LN_2;
            }
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (token[r] >= tile.num_tokens) continue;
        const i64 index = static_cast<i64>(tile.partial + token[r]) * params.num_qo_heads + head[r];
        store_float_row(o, r, weight[r], params.plan.partial_o + index * head_dim_vo, head_dim_vo, lane);
        if (lane % 4 == 0) params.plan.partial_lse[index] = lse[r];
    }
}

}  // namespace folio::prefill
