// Soft caps in a kernel of their own: from products of a step to probabilities, at about the cost of plain logits.
//
// Capped logits are bounded. So exponentials need no maximum of a row: they are taken relative to a power of two that is
// the same for all. The comparisons that this saves are the time for tanh by a polynomial, which is part of the exponent.
// Registers only; the layout of logits is softmax.cuh's.
#pragma once

#include "sm90/prefill/softmax.cuh"
#include "sm90/prefill/step_logits.cuh"

namespace folio::prefill {

// Of a tile: cap * log2(e) * tanh(k s) as s (terms[0] + u (terms[1] + u terms[2])) at u = s^2, for |k s| up to NEAR_TO.
struct CapSeries {
    // The error of tanh is below 1e-6.
    static constexpr float TANH[] = {0.99998424f, -0.33244488f, 0.12068123f}, NEAR_TO = 0.38f;

    float terms[3];
    float most_squares;  // of products whose magnitudes are all known to be near enough; negative: none are

    CapSeries() = default;

    __device__ __forceinline__ CapSeries(const FolioAttentionParams &params, u32 kv_head) {
        const float cap = params.logits_soft_cap, k = __fdividef(product_scale(params, kv_head), cap);
        float factor = k * cap * LOG2_E;
#pragma unroll
        for (int t = 0; t < 3; ++t) {
            terms[t] = TANH[t] * factor;
            factor *= k * k;
        }
        const float farthest = __fdividef(NEAR_TO, k);
        // Elsewhere the fifth power of k is not a number, or a limit is not.
        most_squares = fabsf(k) > 1e-6f && fabsf(k) < 1e6f ? farthest * farthest : -1.0f;
    }

    // Whether the series is right for all of a warp's products: by sums of their squares, since additions take half as long
    // as comparisons. Not so for NaN.
    template <int N>
    __device__ __forceinline__ bool is_near(const float (&s)[N]) const {
        constexpr int SUMS = 4;
        float squares[SUMS];
#pragma unroll
        for (int i = 0; i < N; ++i) squares[i % SUMS] = fmaf(s[i], s[i], i < SUMS ? 0.0f : squares[i % SUMS]);
        bool near = true;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) near = near && squares[i] <= most_squares;
        return __all_sync(FULL_WARP, near);
    }

    __device__ __forceinline__ float exponent(float s, float reference) const {
        const float u = s * s;
        return fmaf(s, fmaf(fmaf(terms[2], u, terms[1]), u, terms[0]), -reference);
    }
};

// The softmax state of the thread's two rows under a cap of at most 64: of exponentials relative to 2^REFERENCE, whose sum
// of 2^30 is a number, and none of which is 0.
struct CappedRows {
    static constexpr float REFERENCE = 32.0f;
    float row_max[2] = {REFERENCE, REFERENCE}, sum[2] = {};

    // s becomes exp2(logit - REFERENCE). `hide` masks logits of a block of which not all keys are seen.
    template <int N, class Hide>
    __device__ __forceinline__ void add(float (&s)[N], const CapSeries &series, const FolioAttentionParams &params,
                                        u32 kv_head, bool hides, const Hide &hide) {
        const bool near = series.is_near(s);
        if (near && !hides) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                s[i] = exp2_approx(series.exponent(s[i], REFERENCE));
                sum[i / 2 % 2] += s[i];
            }
            return;
        }
        if (near) {
#pragma unroll
            for (int i = 0; i < N; ++i) s[i] = series.exponent(s[i], REFERENCE);
        } else {
            const StepLogits logits(params, kv_head);
            logits.transform(s, params, kv_head);
#pragma unroll
            for (int i = 0; i < N; ++i) s[i] = fmaf(s[i], logits.exponent, -REFERENCE);
        }
        if (hides) hide(s);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = exp2_approx(s[i]);
            sum[i / 2 % 2] += s[i];
        }
    }
};

template <bool CAPPED>
struct StateOf {
    using Type = Rows;
};
template <>
struct StateOf<true> {
    using Type = CappedRows;
};

}  // namespace folio::prefill
