// The end of a tile in the Hopper prefill kernel: from accumulators to rows of o, of any floating type, and lse, or to
// partial results. For those the combine kernel adds the sink and the value scale, unless that is a request's.
#pragma once

#include "core/cache_rounding.cuh"
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

// Two neighbours of a row in a word, and eight of them from the words of a quad's lanes.
template <class T>
__device__ __forceinline__ u32 pack_two(float first, float second) {
    if constexpr (T::IS_FP8) {
        return pack_fp8<T>(first, second);
    } else {
        return T::pack(first, second);
    }
}

template <class Storage>
__device__ __forceinline__ void store_eight(Storage *at, const u32 (&x)[4]) {
    if constexpr (sizeof(Storage) == 1) {
        *reinterpret_cast<uint2 *>(at) = make_uint2(x[0] | x[1] << 16, x[2] | x[3] << 16);
    } else {
        *reinterpret_cast<uint4 *>(at) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

// One row (r = 0 or 1 of the thread's two), `columns` of it, whose first element is at `place`, in pieces of eight. Every
// lane takes part; `keep` says who stores.
template <class T, int N>
__device__ __forceinline__ void store_row(const float (&o)[N], int r, float weight, void *base, i64 place, u32 columns,
                                          bool keep, u32 lane) {
    auto *const row = static_cast<typename T::Storage *>(base) + place;
#pragma unroll
    for (int j = 0; j < N; j += 16) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = j + 4 * i + 2 * r;
            x[i] = j + 4 * i < N ? pack_two<T>(o[first] * weight, o[first + 1] * weight) : 0;
        }
        quad_transpose(x, lane);
        const u32 column = 2 * j + 8 * (lane % 4);
        if (keep && column < columns) store_eight(row + column, x);
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

__device__ __forceinline__ u32 dtype_of_o(const FolioAttentionParams &params) {
    return reinterpret_cast<const FolioPrefillParams &>(params).o_dtype;
}

// What the rows of a tile are multiplied by.
__device__ __forceinline__ float output_scale(const FolioAttentionParams &params, const Tile &tile, bool whole) {
    if (!whole) return part_scale(params, tile.kv_head, tile.request.index);
    const float scale = params.v_scale * value_scale(params, tile.kv_head, tile.request.index);
    return dtype_of_o(params) >= FOLIO_E4M3 ? scale / params.o_scale : scale;
}

// The same for a row of o. Only queries that were made fp16, over ragged keys, have outputs in the other type of 16 bits.
template <int N>
__device__ __forceinline__ void store_whole_row(const FolioAttentionParams &params, const float (&o)[N], int r,
                                                float weight, i64 place, u32 columns, bool keep, u32 lane) {
    void *const base = params.o.data;
    const u32 dtype = dtype_of_o(params);
    if (dtype == FOLIO_F32) {
        if (keep) store_float_row(o, r, weight, static_cast<float *>(base) + place, columns, lane);
    } else if (dtype == FOLIO_E4M3) {
        store_row<e4m3>(o, r, weight, base, place, columns, keep, lane);
    } else if (dtype == FOLIO_E5M2) {
        store_row<e5m2>(o, r, weight, base, place, columns, keep, lane);
    } else if (KV_ROWS == KvRows::RAGGED && !Query::IS_BF16 && dtype == FOLIO_BF16) {
        store_row<bf16>(o, r, weight, base, place, columns, keep, lane);
    } else {
        store_row<Query>(o, r, weight, base, place, columns, keep, lane);
    }
}

template <int N, class Rows>
__device__ __forceinline__ void store_output(const FolioAttentionParams &params, u32 head_dim_vo, const Tile &tile,
                                             const float (&o)[N], const Rows &rows) {
    const u32 lane = threadIdx.x % 32;
    const bool whole = tile.partial == FOLIO_NO_PARTIAL;
    const float v_scale = output_scale(params, tile, whole);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = first_row() + 8 * r, token = tile.stored_position_of(row), head = tile.head_of(row);
        const float sink = whole && params.sinks != nullptr ? params.sinks[head] * LOG2_E : minus_infinity();
        const RowEnd end(rows.row_max[r], quad_sum(rows.sum[r]), sink);
        const float weight = end.weight * v_scale;
        const bool keep = token < tile.num_tokens;
        if (whole) {
            const i64 q_row = tile.token + token;
            const i64 place = q_row * params.o.stride_token + head * params.o.stride_head;
            store_whole_row(params, o, r, weight, place, head_dim_vo, keep, lane);
            if (keep && lane % 4 == 0 && params.lse != nullptr) {
                params.lse[q_row * params.lse_stride_token + head * params.lse_stride_head] =
                    lse_in_base(end.lse, params.flags);
            }
        } else if (keep) {
            const i64 index = static_cast<i64>(tile.partial + token) * params.num_qo_heads + head;
            store_float_row(o, r, weight, params.plan.partial_o + index * head_dim_vo, head_dim_vo, lane);
            if (lane % 4 == 0) params.plan.partial_lse[index] = end.lse;
        }
    }
}

}  // namespace folio::prefill
