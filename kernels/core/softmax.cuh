// Softmax statistics of rows, in base 2: maximum and sum, sink, log-sum-exp. Plain functions of a row's numbers; how a
// row is spread over threads is each kernel's own.
#pragma once
#include "core/logits.cuh"

namespace folio {

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Running softmax of one row: the largest logit, and the sum of exponentials relative to it.
struct RowState {
    float max, sum;
};

// What exponents are relative to. Not -inf, for a row without keys so far: that would form inf - inf.
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

// In base 2. -inf for a row without keys; NaN where a logit was NaN.
__device__ __forceinline__ float log_sum_exp(const RowState &row) {
    return row.sum == 0.0f ? minus_infinity() : row.max + log2_approx(row.sum);
}

// The same number of the base that the run asked for, in base 2.
__device__ __forceinline__ float lse_in_base_2(float lse, u32 flags) {
    return flags & FOLIO_RUN_LSE_BASE_2 ? lse : lse * LOG2_E;
}

// The lse in the base that the run asked for.
__device__ __forceinline__ float lse_in_base(float lse, u32 flags) {
    return flags & FOLIO_RUN_LSE_BASE_2 ? lse : lse * LN_2;
}

}  // namespace folio
