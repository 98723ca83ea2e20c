// One row of the result: to the output, or to the partial results where its item is one chunk of several.
#pragma once

#include "sm90/decode/work.cuh"

namespace folio::decode {

__device__ __forceinline__ float4 scaled(float4 x, float f) { return make_float4(x.x * f, x.y * f, x.z * f, x.w * f); }

// Four neighbouring elements; rows are aligned to four elements.
__device__ __forceinline__ void store_four(void *base, u32 dtype, i64 index, float4 x) {
    switch (dtype) {
        case FOLIO_F32: *reinterpret_cast<float4 *>(static_cast<float *>(base) + index) = x; break;
        case FOLIO_F16:
            *reinterpret_cast<uint2 *>(static_cast<u16 *>(base) + index) =
                make_uint2(f16::pack(x.x, x.y), f16::pack(x.z, x.w));
            break;
        case FOLIO_BF16:
            *reinterpret_cast<uint2 *>(static_cast<u16 *>(base) + index) =
                make_uint2(bf16::pack(x.x, x.y), bf16::pack(x.z, x.w));
            break;
        default: {
            const float all[4] = {x.x, x.y, x.z, x.w};
            u32 bytes = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                bytes |= static_cast<u32>(dtype == FOLIO_E4M3 ? e4m3::store(all[i]) : e5m2::store(all[i])) << 8 * i;
            }
            *reinterpret_cast<u32 *>(static_cast<u8 *>(base) + index) = bytes;
        }
    }
}

// Where a row goes, and what its sums are multiplied by.
struct alignas(16) RowTarget {
    i64 element;
    float factor;

    // Of row `row` of a KV head, whose sums are relative to the state's maximum. `store_lse`: its lse goes out as well.
    __device__ __forceinline__ RowTarget(const FolioPaddedDecodeParams &params, const Item &item, u32 kv_head, u32 row,
                                         RowState state, bool store_lse) {
        const FolioAttentionParams &p = params.attention;
        const PackedRow packed = packed_row(params, item, row);
        const u32 head = kv_head * params.group_size + packed.head;
        if (item.is_part()) {
            const i64 at = static_cast<i64>(item.work.partial + packed.query) * p.num_qo_heads + head;
            element = at * params.head_dim_vo;
            factor = part_scale(p, kv_head, item.work.request);
            if (store_lse) p.plan.partial_lse[at] = log_sum_exp(state);
        } else {
            const i64 token = static_cast<i64>(item.work.q_token) + packed.query;
            element = token * p.o.stride_token + head * p.o.stride_head;
            factor = p.v_scale * value_scale(p, kv_head, item.work.request);
            if (params.o_dtype >= FOLIO_E4M3) factor /= p.o_scale;
            if (p.sinks) factor *= add_sink(state, p.sinks[head] * LOG2_E);
            if (store_lse && p.lse) {
                p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = lse_in_base(log_sum_exp(state), p.flags);
            }
        }
        factor = state.sum == 0.0f ? 0.0f : factor * VALUE_UNITS / state.sum;
    }

    // Columns column .. column + 3.
    __device__ __forceinline__ void store(const FolioPaddedDecodeParams &params, const Item &item, u32 column,
                                          float4 sum) const {
        const FolioAttentionParams &p = params.attention;
        if (item.is_part()) {
            store_four(p.plan.partial_o, FOLIO_F32, element + column, scaled(sum, factor));
        } else {
            store_four(p.o.data, params.o_dtype, element + column, scaled(sum, factor));
        }
    }
};

}  // namespace folio::decode
