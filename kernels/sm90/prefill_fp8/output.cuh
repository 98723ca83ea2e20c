// The end of a tile in the Hopper fp8 prefill kernel: from sums of P V and of P to rows of o and lse, or to partial
// results. For those the combine kernel adds the sink and the value scale, unless that is a request's.
#pragma once

#include "sm90/prefill_fp8/softmax.cuh"

namespace folio::prefill_fp8 {

// Sums of P V in 128 columns, and in the last four registers those of P: every column of the ones is the same.
using Output = float[DIM / 2 + 4];

__device__ __forceinline__ float probability_sum(const Output &o, int r) { return o[DIM / 2 + 2 * r]; }

// Four neighbours of a row as one store.
template <class Element>
__device__ __forceinline__ void store_four(typename Element::Storage *at, float4 x) {
    if constexpr (sizeof(*at) == 4) {
        *reinterpret_cast<float4 *>(at) = x;
    } else if constexpr (sizeof(*at) == 2) {
        *reinterpret_cast<uint2 *>(at) = make_uint2(Element::pack(x.x, x.y), Element::pack(x.z, x.w));
    } else {
        *reinterpret_cast<u32 *>(at) = Element::store(x.x) | Element::store(x.y) << 8 | Element::store(x.z) << 16 |
                                       static_cast<u32>(Element::store(x.w)) << 24;
    }
}

template <>
__device__ __forceinline__ void store_four<e4m3>(u8 *at, float4 x) {
    *reinterpret_cast<u32 *>(at) = pack_e4m3(x.x, x.y, x.z, x.w);
}

// One of the thread's rows. The lanes of a quad have four columns of every 16 each, of which transposed values hold the
// even ones first.
template <class Element>
__device__ __forceinline__ void store_row_as(const Output &o, int r, float factor, void *base, i64 index) {
    auto *own = static_cast<typename Element::Storage *>(base) + index + 4 * (threadIdx.x % 4);
#pragma unroll
    for (int block = 0; block < DIM / 16; ++block) {
        const float *even = o + 8 * block + 2 * r, *odd = even + 4;
        store_four<Element>(own + 16 * block,
                            make_float4(even[0] * factor, odd[0] * factor, even[1] * factor, odd[1] * factor));
    }
}

__device__ __forceinline__ void store_row(const Output &o, int r, float factor, void *base, u32 dtype, i64 index) {
    switch (dtype) {
        case FOLIO_F32: return store_row_as<f32>(o, r, factor, base, index);
        case FOLIO_F16: return store_row_as<f16>(o, r, factor, base, index);
        case FOLIO_BF16: return store_row_as<bf16>(o, r, factor, base, index);
        case FOLIO_E4M3: return store_row_as<e4m3>(o, r, factor, base, index);
        default: return store_row_as<e5m2>(o, r, factor, base, index);
    }
}

__device__ __forceinline__ void store_output(const FolioPrefillFp8Params &params, const Tile &tile, const Output &o,
                                             const Rows &rows) {
    const FolioAttentionParams &p = params.attention;
    const bool whole = tile.partial == FOLIO_NO_PARTIAL;
    const bool first_lane = threadIdx.x % 4 == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 row = first_row() + 8 * r, token = row >> tile.pack_shift;
        if (token >= tile.num_tokens) continue;
        const u32 head = tile.head + row - (token << tile.pack_shift);
        const float sum = probability_sum(o, r);
        RowState state = {sum > 0.0f ? rows.reference[r] : minus_infinity(), sum};
        if (!whole) {
            const i64 at = static_cast<i64>(tile.partial + token) * p.num_qo_heads + head;
            store_row(o, r, sum == 0.0f ? 0.0f : part_scale(p, tile.kv_head, tile.request) / sum, p.plan.partial_o,
                      FOLIO_F32, at * DIM);
            if (first_lane) p.plan.partial_lse[at] = log_sum_exp(state);
            continue;
        }
        const i64 q_row = static_cast<i64>(tile.token) + token;
        float factor = p.v_scale * value_scale(p, tile.kv_head, tile.request) / p.o_scale;
        if (p.sinks) factor *= add_sink(state, p.sinks[head] * LOG2_E);
        store_row(o, r, state.sum == 0.0f ? 0.0f : factor / state.sum, p.o.data, params.o_dtype,
                  q_row * p.o.stride_token + head * p.o.stride_head);
        if (first_lane && p.lse) {
            p.lse[q_row * p.lse_stride_token + head * p.lse_stride_head] = lse_in_base(log_sum_exp(state), p.flags);
        }
    }
}

}  // namespace folio::prefill_fp8
