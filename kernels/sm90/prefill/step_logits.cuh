// From products of a step to logits in the Hopper prefill kernel, for what a factor in the exponent does not say: soft
// caps, and scales that are not positive. logits.cuh's rule; registers only.
//
// The rule takes an exponential and a reciprocal for a soft cap, beside the exponential that every logit takes. By these
// three a step takes 63 % longer at head_dim 128, and 21 % at 256. Where all logits of a warp are within the cap, tanh is a
// series of multiplications instead.
#pragma once

#include "sm90/prefill/tile.cuh"

namespace folio::prefill {

// Where the series was measured. Cascades have no registers for it.
constexpr bool HAS_SERIES =
    !MASKED && !OWN_KEYS && DIM_QK == DIM_VO && (DIM_QK == 64 || DIM_QK == 128 || DIM_QK == 256);

class StepLogits {
public:
    float exponent;   // what exponents multiply s by
    bool transforms;  // s, before exponents are taken

    __device__ __forceinline__ StepLogits(const FolioAttentionParams &params, const Tile &tile) {
        const float scale = tile.product_scale(params), cap = params.logits_soft_cap;
        const bool folds = scale > 0.0f && (HAS_SERIES || cap == 0.0f);
        exponent = folds ? scale * LOG2_E : 1.0f;
        transforms = cap > 0.0f || !folds;
    }

    // Of a step, under the tile's exponent. That is 1, or has the scale of products, which takes loads to find.
    template <int N>
    static __device__ __forceinline__ void transform(float (&s)[N], float exponent, const FolioAttentionParams &params,
                                                     const Tile &tile) {
        if constexpr (HAS_SERIES) {
            if (exponent != 1.0f && by_series(s, __fdividef(exponent * LN_2, params.logits_soft_cap))) return;
        }
        const FoldedLogits logits(params, tile.kv_head, tile.request.index);
        logits.transform(s);
        if (!HAS_SERIES || logits.exponent == exponent) return;
        const float factor = reciprocal_approx(exponent);
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] *= factor;
    }

private:
    // s becomes s tanh(x) / x at x = k s, tanh(x) being x (1 + u (a + b u + ...)) at u = x^2. The error of tanh is below
    // 1e-6. False, and nothing done, where x is beyond what the series are for.
    template <int N>
    static __device__ __forceinline__ bool by_series(float (&s)[N], float k) {
        constexpr float NEAR[] = {-0.332948178f, 0.12404719f}, NEAR_TO = 0.35f;
        constexpr float FAR[] = {-0.333235472f, 0.132320136f, -0.0502159931f, 0.0151815852f, -0.00245659472f};
        constexpr float FAR_TO = 1.1f;
        // The fourth power of k is a number. Without a cap, k is not.
        if (!(k > 1e-8f && k < 1e8f)) return false;
        const float farthest = largest_magnitude(s) * k;
        if (__all_sync(FULL_WARP, farthest <= NEAR_TO)) {
            const float u = k * k, terms[] = {NEAR[0] * u, NEAR[1] * (u * u)};
            sum_series(s, 1.0f, terms);
            return true;
        }
        if (!__all_sync(FULL_WARP, farthest <= FAR_TO)) return false;
        sum_series(s, k, FAR);
        return true;
    }

    template <int N>
    static __device__ __forceinline__ float largest_magnitude(const float (&s)[N]) {
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(s[i]));
        return largest;
    }

    template <int N, int TERMS>
    static __device__ __forceinline__ void sum_series(float (&s)[N], float k, const float (&terms)[TERMS]) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float x = k * s[i], u = x * x;
            float series = terms[TERMS - 1];
#pragma unroll
            for (int t = TERMS - 2; t >= 0; --t) series = fmaf(series, u, terms[t]);
            s[i] *= fmaf(series, u, 1.0f);
        }
    }
};

}  // namespace folio::prefill
