// Soft caps of a step's logits in the Hopper prefill kernel: logits.cuh's rule by multiplications only, where logits are
// not above the cap. Its form by an exponential and a reciprocal would ask the unit for those three times a logit, which
// takes longer than the products of a step.
#pragma once

#include "sm90/prefill/tile.cuh"

namespace folio::prefill {

// tanh(x) / x at u = x^2, of which the relative error is 7e-6 up to 1: 4e-4 of a logit under a cap of 50.
__device__ __forceinline__ float tanh_ratio(float u) {
    float ratio = 0.00903642421f;
    ratio = fmaf(ratio, u, -0.0448175546f);
    ratio = fmaf(ratio, u, 0.130368113f);
    ratio = fmaf(ratio, u, -0.332980653f);
    return fmaf(ratio, u, 0.999993089f);
}

// Products become logits whose exponent is 1. Warps whose logits are all within the cap are the fast ones.
template <int N>
__device__ __forceinline__ void transform(float (&s)[N], const FoldedLogits &logits) {
    // Wider products take as long as the exponentials, and leave no registers.
    if (DIM_QK > 128 || logits.cap == 0.0f) return logits.transform(s);
    const float scale = logits.product / (2 * LOG2_E);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        s[i] *= scale;
        largest = fmaxf(largest, fabsf(s[i]));
    }
    if (__any_sync(FULL_WARP, largest > 1.0f)) {
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = logits.cap * tanh_accurate(s[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = s[i] * logits.cap * tanh_ratio(s[i] * s[i]);
    }
}

}  // namespace folio::prefill
