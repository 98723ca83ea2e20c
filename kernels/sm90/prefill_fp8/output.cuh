// The end of a tile in the Hopper fp8 prefill kernel: from sums of P V and of P to rows of o and lse, or to partial
// results. For those the combine kernel adds the sink and the value scale, unless that is a request's.
#pragma once

#include "sm90/prefill_fp8/softmax.cuh"

namespace folio::prefill_fp8 {

// Sums of P V in all columns, and in the last four registers those of P: every column of the ones is the same.
using Output = float[DIM / 2 + 4];

__device__ __forceinline__ float probability_sum(const Output &o, int r) { return o[DIM / 2 + 2 * r]; }

// Where the thread's rows go. Found before the sums are there, because each load of it takes 150 clocks among the
// exponentials of other warps.
struct Destination {
    u8 *row[2];  // at the thread's first column
    bool exists[2];
    u32 dtype;
    float scale;  // of sums of P V

    __device__ __forceinline__ Destination(const FolioPrefillFp8Params &params, const Tile &tile) {
        const FolioAttentionParams &p = params.attention;
        const bool whole = tile.partial == FOLIO_NO_PARTIAL;
        dtype = whole ? params.o_dtype : FOLIO_F32;
        scale = whole ? p.v_scale * value_scale(p, tile.kv_head, tile.request) / p.o_scale
                      : part_scale(p, tile.kv_head, tile.request);
        const u32 size = dtype == FOLIO_F32 ? 4 : dtype == FOLIO_F16 || dtype == FOLIO_BF16 ? 2 : 1;
        const i64 token_stride = whole ? p.o.stride_token : static_cast<i64>(p.num_qo_heads) * params.head_dim_vo;
        const i64 head_stride = whole ? p.o.stride_head : params.head_dim_vo;
        u8 *const base = whole ? static_cast<u8 *>(p.o.data) : reinterpret_cast<u8 *>(p.plan.partial_o);
        const u32 first_token = whole ? tile.token : tile.partial;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 tile_row = first_row() + 8 * r, token = tile_row >> tile.pack_shift;
            const u32 head = tile.head + tile_row - (token << tile.pack_shift);
            exists[r] = token < tile.num_tokens;
            row[r] = base + size * ((first_token + token) * token_stride + head * head_stride + threadIdx.x % 4 * 4);
        }
    }
};

// Four neighbours of a row as words.
template <class Element>
__device__ __forceinline__ void pack_four(u32 *words, float4 x) {
    if constexpr (sizeof(typename Element::Storage) == 4) {
        words[0] = __float_as_uint(x.x), words[1] = __float_as_uint(x.y);
        words[2] = __float_as_uint(x.z), words[3] = __float_as_uint(x.w);
    } else if constexpr (sizeof(typename Element::Storage) == 2) {
        words[0] = Element::pack(x.x, x.y), words[1] = Element::pack(x.z, x.w);
    } else {
        words[0] = Element::store(x.x) | Element::store(x.y) << 8 | Element::store(x.z) << 16 |
                   static_cast<u32>(Element::store(x.w)) << 24;
    }
}

template <>
__device__ __forceinline__ void pack_four<e4m3>(u32 *words, float4 x) {
    words[0] = pack_e4m3(x.x, x.y, x.z, x.w);
}

template <u32 SIZE>
__device__ __forceinline__ void store_words(u8 *at, const u32 *words) {
    if constexpr (SIZE == 4) {
        *reinterpret_cast<uint4 *>(at) = make_uint4(words[0], words[1], words[2], words[3]);
    } else if constexpr (SIZE == 2) {
        *reinterpret_cast<uint2 *>(at) = make_uint2(words[0], words[1]);
    } else {
        *reinterpret_cast<u32 *>(at) = words[0];
    }
}

// The lanes of a quad have four columns of every 16 each, of which transposed values hold the even ones first. All words
// are made before the first is stored, because a store reads its registers late: 1 % of the time of 4 x 4k. Those of 256
// columns are made a row at a time, because registers are short.
template <class Element>
__device__ __forceinline__ void store_rows_as(const Output &o, const float (&factor)[2], const Destination &to,
                                              u32 head_dim) {
    constexpr u32 SIZE = sizeof(typename Element::Storage);
    constexpr int TOGETHER = DIM > 128 ? 1 : 2;
    u32 words[TOGETHER][DIM / 16 * SIZE];
#pragma unroll
    for (int first = 0; first < 2; first += TOGETHER) {
#pragma unroll
        for (int r = first; r < first + TOGETHER; ++r) {
#pragma unroll
            for (int block = 0; block < DIM / 16; ++block) {
                const float *even = o + 8 * block + 2 * r, *odd = even + 4;
                pack_four<Element>(
                    words[r - first] + block * SIZE,
                    make_float4(even[0] * factor[r], odd[0] * factor[r], even[1] * factor[r], odd[1] * factor[r]));
            }
            pin(words[r - first]);
        }
#pragma unroll
        for (int r = first; r < first + TOGETHER; ++r) {
            if (!to.exists[r]) continue;
#pragma unroll
            for (u32 block = 0; block < DIM / 16; ++block) {
                if (16 * block < head_dim) {
                    store_words<SIZE>(to.row[r] + 16 * SIZE * block, words[r - first] + block * SIZE);
                }
            }
        }
    }
}

__device__ __forceinline__ void store_rows(const Output &o, const float (&factor)[2], const Destination &to,
                                           u32 head_dim) {
    if (to.dtype == FOLIO_BF16) return store_rows_as<bf16>(o, factor, to, head_dim);
    switch (to.dtype) {
        case FOLIO_F32: return store_rows_as<f32>(o, factor, to, head_dim);
        case FOLIO_F16: return store_rows_as<f16>(o, factor, to, head_dim);
        case FOLIO_E4M3: return store_rows_as<e4m3>(o, factor, to, head_dim);
        default: return store_rows_as<e5m2>(o, factor, to, head_dim);
    }
}

__device__ __forceinline__ void store_lse(const FolioAttentionParams &p, const Tile &tile, u32 token, u32 head,
                                          const RowState &state) {
    if (tile.partial != FOLIO_NO_PARTIAL) {
        p.plan.partial_lse[static_cast<i64>(tile.partial + token) * p.num_qo_heads + head] = log_sum_exp(state);
    } else {
        const i64 q_row = static_cast<i64>(tile.token) + token;
        p.lse[q_row * p.lse_stride_token + head * p.lse_stride_head] = lse_in_base(log_sum_exp(state), p.flags);
    }
}

__device__ __forceinline__ void store_output(const FolioPrefillFp8Params &params, const Tile &tile, const Output &o,
                                             const Rows &rows, const Destination &to) {
    const FolioAttentionParams &p = params.attention;
    RowState state[2];
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float sum = probability_sum(o, r);
        state[r] = {sum > 0.0f ? rows.reference[r] : minus_infinity(), sum};
        factor[r] = to.scale;
    }
    const bool whole = tile.partial == FOLIO_NO_PARTIAL, has_sinks = p.sinks && whole, stores_lse = p.lse || !whole;
    if (has_sinks || stores_lse) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 row = first_row() + 8 * r, token = row >> tile.pack_shift;
            const u32 head = tile.head + row - (token << tile.pack_shift);
            if (has_sinks) factor[r] *= add_sink(state[r], p.sinks[head] * LOG2_E);
            if (stores_lse && to.exists[r] && threadIdx.x % 4 == 0) store_lse(p, tile, token, head, state[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = state[r].sum == 0.0f ? 0.0f : __fdividef(factor[r], state[r].sum);
    store_rows(o, factor, to, params.head_dim_vo);
}

}  // namespace folio::prefill_fp8
