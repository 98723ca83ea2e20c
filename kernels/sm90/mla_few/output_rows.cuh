// The state of a row over all warpgroups, its lse, and where the row goes: what both ways to end a unit have in common.
#pragma once

#include "sm90/mla_few/softmax.cuh"

namespace folio::mla_few {

// A warpgroup's sums and maxima, for the others to see.
template <class Format>
__device__ __forceinline__ void publish(const Softmax<Format> &softmax, Statistics<Format> &shared, u32 group, u32 warp,
                                        u32 lane) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        float sum = softmax.sum[n];
#pragma unroll
        for (int lanes = 4; lanes <= 16; lanes *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lanes);
        if (lane >= 4) continue;
        shared.sum[group][warp][lane_row(n, lane)] = sum;
        if (warp == 0) shared.max[group][lane_row(n, lane)] = softmax.max[n];
    }
}

// Of a row, over all warpgroups, once they have published.
template <class Format>
__device__ __forceinline__ RowState total(const Statistics<Format> &shared, u32 row) {
    RowState state = {shared.max[0][row], 0.0f};
#pragma unroll
    for (int g = 1; g < CONSUMERS; ++g) state.max = fmaxf(state.max, shared.max[g][row]);
#pragma unroll
    for (int g = 0; g < CONSUMERS; ++g) {
        const float weight = exp2_approx(shared.max[g][row] - state.max);
#pragma unroll
        for (int w = 0; w < 4; ++w) state.sum += weight * shared.sum[g][w][row];
    }
    return state;
}

// Of the partial results.
__device__ __forceinline__ i64 partial_row(const FolioMlaFewParams &params, const Unit &unit, const TokenHead &at) {
    return static_cast<i64>(unit.work.partial + at.token) * params.mla.attention.num_qo_heads + at.head;
}

__device__ __forceinline__ void store_lse(const FolioMlaFewParams &params, const Unit &unit, u32 row,
                                          const RowState &state) {
    const FolioAttentionParams &p = params.mla.attention;
    const TokenHead at = token_head(params, unit, row);
    const float lse = log_sum_exp(state);
    if (unit.work.partial != FOLIO_NO_PARTIAL) {
        p.plan.partial_lse[partial_row(params, unit, at)] = lse;
    } else if (p.lse) {
        const i64 token = static_cast<i64>(unit.work.q_token) + at.token;
        p.lse[token * p.lse_stride_token + at.head * p.lse_stride_head] = lse_in_base(lse, p.flags);
    }
}

}  // namespace folio::mla_few
