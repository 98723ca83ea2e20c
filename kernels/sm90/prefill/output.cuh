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

// One row (r = 0 or 1 of the thread's two), `columns` of it, in pieces of eight. Every lane takes part; `keep` says who
// stores.
template <class T, int N>
__device__ __forceinline__ void store_row(const float (&o)[N], int r, float weight, typename T::Storage *row,
                                          u32 columns, bool keep, u32 lane) {
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

// The thread's two rows of a tile.
struct OwnRows {
    u32 token[2], head[2];
    float weight[2], lse[2];
    bool exists[2];
};

template <class T, int N>
__device__ __forceinline__ void store_rows(const FolioAttentionParams &params, const Tile &tile, const float (&o)[N],
                                           const OwnRows &own, u32 columns, u32 lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const i64 token = tile.token + own.token[r];
        auto *row = static_cast<typename T::Storage *>(params.o.data) + token * params.o.stride_token +
                    own.head[r] * params.o.stride_head;
        if constexpr (sizeof(*row) == 4) {
            if (own.exists[r]) store_float_row(o, r, own.weight[r], row, columns, lane);
        } else {
            store_row<T>(o, r, own.weight[r], row, columns, own.exists[r], lane);
        }
    }
}

// Where one kernel has queries of both types of 16 bits, that which most have.
template <bool CONVERTS>
struct UsualOutput {
    using Type = Query;
};
template <>
struct UsualOutput<true> {
    using Type = bf16;
};

// In the type of o. That is nearly always the queries', which comes last here: the assembler puts it first, and instructions that
// are jumped over are fetched late. Of the two types of 16 bits both come where queries may be of both, and over ragged keys,
// whose queries may have been made fp16 before.
template <int N>
__device__ __forceinline__ void store_whole_rows(const FolioAttentionParams &params, const Tile &tile,
                                                 const float (&o)[N], const OwnRows &own, u32 dtype, u32 columns,
                                                 u32 lane) {
    if (dtype == FOLIO_F32) {
        store_rows<f32>(params, tile, o, own, columns, lane);
    } else if (dtype == FOLIO_E4M3) {
        store_rows<e4m3>(params, tile, o, own, columns, lane);
    } else if (dtype == FOLIO_E5M2) {
        store_rows<e5m2>(params, tile, o, own, columns, lane);
    } else if (CONVERTS && dtype == FOLIO_F16) {
        store_rows<f16>(params, tile, o, own, columns, lane);
    } else if (KV_ROWS == KvRows::RAGGED && !Query::IS_BF16 && dtype == FOLIO_BF16) {
        store_rows<bf16>(params, tile, o, own, columns, lane);
    } else {
        store_rows<UsualOutput<CONVERTS>::Type>(params, tile, o, own, columns, lane);
    }
}

// What the rows of a tile are multiplied by.
__device__ __forceinline__ float output_scale(const FolioAttentionParams &params, const Tile &tile, bool whole) {
    if (!whole) return part_scale(params, tile.kv_head, tile.request.index);
    return params.v_scale * value_scale(params, tile.kv_head, tile.request.index);
}

template <int N, class Rows>
__device__ __forceinline__ void store_output(const FolioAttentionParams &params, u32 head_dim_vo, const Tile &tile,
                                             const float (&o)[N], const Rows &rows) {
    const u32 lane = threadIdx.x % 32;
    const bool whole = tile.partial == FOLIO_NO_PARTIAL;
    const float v_scale = output_scale(params, tile, whole);
    const u32 flags = params.flags;
    OwnRows own;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = first_row() + 8 * r;
        own.token[r] = tile.stored_position_of(row);
        own.head[r] = tile.head_of(row);
        own.exists[r] = own.token[r] < tile.num_tokens;
        const float sink = whole && params.sinks != nullptr ? params.sinks[own.head[r]] * LOG2_E : minus_infinity();
        const RowEnd end(rows.row_max[r], quad_sum(rows.sum[r]), sink);
        own.weight[r] = end.weight * v_scale;
        own.lse[r] = end.lse;
    }
    if (whole) {
        store_whole_rows(params, tile, o, own, flags >> FOLIO_O_DTYPE_SHIFT, head_dim_vo, lane);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (!own.exists[r] || lane % 4 != 0 || params.lse == nullptr) continue;
            const i64 token = tile.token + own.token[r];
            params.lse[token * params.lse_stride_token + own.head[r] * params.lse_stride_head] =
                lse_in_base(own.lse[r], flags);
        }
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (!own.exists[r]) continue;
        const i64 index = static_cast<i64>(tile.partial + own.token[r]) * params.num_qo_heads + own.head[r];
        store_float_row(o, r, own.weight[r], params.plan.partial_o + index * head_dim_vo, head_dim_vo, lane);
        if (lane % 4 == 0) params.plan.partial_lse[index] = own.lse[r];
    }
}

}  // namespace folio::prefill
