// The end of a row in the generic kernels: it is stored to the output and lse, with sink, value scale and fp8
// quantisation; or, where the row's keys were split, to the partial results that plan/combine.cu combines.
#pragma once
#include "core/mask.cuh"
#include "core/softmax.cuh"

namespace folio {

// One query head of one token. `values` given to `store` are sums of exponentials times values, relative
// to the state's maximum.
struct OutputRow {
    void *values;
    float *lse_at;
    float factor, lse;
    u32 dtype;

    // `row` counts the item's rows, all heads of the group: token * group + head in group.
    __device__ __forceinline__ OutputRow(const FolioAttentionParams &p, const FolioGenericParams &g,
                                         const FolioWorkItem &item, u32 kv_head, u32 row, RowState state) {
        const u32 group = p.num_qo_heads / p.num_kv_heads, token = row / group;
        const u32 head = kv_head * group + row % group;
        if (item.partial != FOLIO_NO_PARTIAL) {
            const i64 at = (static_cast<i64>(item.partial) + token) * p.num_qo_heads + head;
            values = p.plan.partial_o + at * g.head_dim_vo;
            lse_at = p.plan.partial_lse + at;
            lse = log_sum_exp(state);
            factor = state.sum == 0.0f ? 0.0f : part_scale(p, kv_head, item.request) / state.sum;
            dtype = FOLIO_F32;
            return;
        }
        const i64 out_token = static_cast<i64>(item.q_token) + token;
        float correction = 1.0f;
        if (p.sinks) correction = add_sink(state, p.sinks[head] * LOG2_E);
        const float v_scale = p.v_scale * value_scale(p, kv_head, item.request) / p.o_scale;
        values = advance(p.o, g.o_dtype, out_token, head);
        lse_at = p.lse ? p.lse + out_token * p.lse_stride_token + head * p.lse_stride_head : nullptr;
        lse = lse_in_base(log_sum_exp(state), p.flags);
        factor = state.sum == 0.0f ? 0.0f : correction / state.sum * v_scale;
        dtype = g.o_dtype;
    }

    static __device__ __forceinline__ void *advance(const FolioRows &rows, u32 dtype, i64 token, i64 head) {
        const i64 size = dtype == FOLIO_F32 ? 4 : dtype <= FOLIO_BF16 ? 2 : 1;
        return static_cast<u8 *>(rows.data) + (token * rows.stride_token + head * rows.stride_head) * size;
    }

    // Columns `column` (even) and the next. A row without keys has sums of zero and a factor of zero.
    __device__ __forceinline__ void store(u32 column, float x, float y) const {
        store_pair(values, dtype, column, x * factor, y * factor);
    }

    __device__ __forceinline__ void store_lse() const {
        if (lse_at) *lse_at = lse;
    }
};

}  // namespace folio
