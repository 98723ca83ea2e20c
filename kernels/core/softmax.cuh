// Scores and softmax statistics, all in base 2: a score is multiplied by log2(e) once, so that every
// exponential is one instruction. The arithmetic of the contract: scale, soft cap, mask, ALiBi, sink.
#pragma once
#include "core/mask.cuh"

namespace folio {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Factor of a KV head from one or num_kv_heads scales, or none.
__device__ __forceinline__ float head_scale(const float *scales, i32 stride, u32 kv_head) {
    return scales ? scales[static_cast<i64>(stride) * kv_head] : 1.0f;
}

// tanh with an absolute error near 1e-7, against 5e-4 of tanh.approx; saturates, as 2^x overflows to inf.
__device__ __forceinline__ float tanh_exact(float x) {
    return 1.0f - 2.0f * reciprocal_approx(exp2_approx(2.0f * LOG2_E * x) + 1.0f);
}

// Turns q . k into a base-2 logit, mask apart.
struct Logits {
    float scale;  // with log2(e), or with 1 / cap
    float cap;    // with log2(e); 0: off
    bool alibi, alibi_sqrt;

    __device__ __forceinline__ Logits(const FolioAttentionParams &p, u32 kv_head) {
        const float factor = p.logits_scale * head_scale(p.k_scales, p.k_scales_stride, kv_head);
        const bool capped = p.logits_soft_cap > 0.0f;
        scale = capped ? factor / p.logits_soft_cap : factor * LOG2_E;
        cap = capped ? p.logits_soft_cap * LOG2_E : 0.0f;
        alibi = p.alibi_slopes != nullptr;
        alibi_sqrt = p.flags & FOLIO_RUN_ALIBI_SQRT;
    }

    // `slope` is the head's, with log2(e).
    __device__ __forceinline__ float operator()(float dot, float slope, i32 position, i32 key) const {
        float logit = dot * scale;
        if (cap > 0.0f) logit = cap * tanh_exact(logit);
        if (alibi) logit += slope * distance(position, key);
        return logit;
    }

    __device__ __forceinline__ float distance(i32 position, i32 key) const {
        if (!alibi_sqrt) return static_cast<float>(key - position);
        return key <= position ? -sqrtf(static_cast<float>(position - key)) : 0.0f;
    }
};

// Running softmax of one row: the largest logit, and the sum of exponentials relative to it.
struct RowState {
    float max, sum;
};

// What exponents are relative to: a row that has seen nothing must not form inf - inf.
__device__ __forceinline__ float exponent_base(float max) { return max == minus_infinity() ? 0.0f : max; }

// One more logit, with no value behind it. Returns the factor for what was accumulated before.
__device__ __forceinline__ float add_sink(RowState &row, float sink_logit) {
    const float max = fmaxf(row.max, sink_logit);
    const float base = exponent_base(max);
    const float correction = exp2_approx(row.max - base);
    row.sum = row.sum * correction + exp2_approx(sink_logit - base);
    row.max = max;
    return correction;
}

// Base 2; -inf where nothing was seen, and NaN where that was seen.
__device__ __forceinline__ float log_sum_exp(const RowState &row) {
    return row.sum == 0.0f ? minus_infinity() : row.max + log2_approx(row.sum);
}

// The lse in the base that the run asked for.
__device__ __forceinline__ float lse_in_base(float lse, u32 flags) {
    return flags & FOLIO_RUN_LSE_BASE_2 ? lse : lse * LN_2;
}

}  // namespace folio
