// From q . k to logits in base 2: scale, soft cap, ALiBi. A product is multiplied by log2(e) once, so that every
// exponential is one instruction. The rule stands here once, for all kernels; which keys count at all is mask.cuh's,
// and what becomes of logits is softmax.cuh's.
//
// There are two forms. LogitRule gives finished logits. FoldedLogits leaves the scale to the exponent, where it costs
// nothing, for a kernel that is bound by arithmetic; it has no ALiBi.
#pragma once
#include "core/scales.cuh"

namespace folio {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// 1 / (2^x + 1). With x = 2 log2(e) y, tanh(y) is 1 minus twice this: the absolute error is near 1e-7, against 5e-4 of
// tanh.approx, which a cap of 50 makes 0.02 of a logit. Saturates, as 2^x overflows to inf.
__device__ __forceinline__ float reciprocal_of_exp2_plus_1(float x) { return reciprocal_approx(exp2_approx(x) + 1.0f); }

__device__ __forceinline__ float tanh_accurate(float x) {
    return 1.0f - 2.0f * reciprocal_of_exp2_plus_1(2.0f * LOG2_E * x);
}

// Whether a run's scale takes in 1 / cap by a division, or by a multiplication with the reciprocal; they differ in the
// last bit.
enum class CapDivision { EXACT, BY_RECIPROCAL };

// Soft cap and ALiBi of a run. The scale of a KV head and the slope of a query head are the caller's to keep.
struct LogitRule {
    float soft_cap;  // as given
    float cap;       // with log2(e); 0: off
    bool alibi, alibi_sqrt;

    __device__ __forceinline__ explicit LogitRule(const FolioAttentionParams &p)
        : soft_cap(p.logits_soft_cap),
          cap(p.logits_soft_cap > 0.0f ? p.logits_soft_cap * LOG2_E : 0.0f),
          alibi(p.alibi_slopes != nullptr),
          alibi_sqrt(p.flags & FOLIO_RUN_ALIBI_SQRT) {}

    // A logit is a product times the scale, and no more.
    __device__ __forceinline__ bool plain() const { return cap == 0.0f && !alibi; }

    // What products of a KV head are multiplied by: with log2(e), or with 1 / cap. `request` as in product_scale.
    template <CapDivision DIVISION>
    __device__ __forceinline__ float scale(const FolioAttentionParams &p, u32 kv_head, u32 request = 0) const {
        const float factor = product_scale(p, kv_head, request);
        if (DIVISION == CapDivision::BY_RECIPROCAL) return factor * (cap > 0.0f ? 1.0f / soft_cap : LOG2_E);
        return cap > 0.0f ? factor / soft_cap : factor * LOG2_E;
    }

    // A query head's slope, with log2(e).
    __device__ __forceinline__ float slope(const FolioAttentionParams &p, u32 request, u32 qo_head) const {
        return alibi ? p.alibi_slopes[request * p.alibi_request_stride + qo_head] * LOG2_E : 0.0f;
    }

    // Of a product times the scale.
    __device__ __forceinline__ float capped(float x) const { return cap * tanh_accurate(x); }

    // What ALiBi takes from a logit. `distance` is from the key to the row.
    __device__ __forceinline__ float bias(float slope, i32 distance) const {
        const float d = static_cast<float>(distance);
        return slope * (alibi_sqrt ? sqrtf(fmaxf(d, 0.0f)) : d);
    }

    __device__ __forceinline__ float operator()(float product, float scale, float slope, i32 distance) const {
        float x = product * scale;
        if (cap > 0.0f) x = capped(x);
        if (alibi) x -= bias(slope, distance);
        return x;
    }
};

// Logits as exponent * s, where s is what `transform` makes of products. It leaves them as they are except under a soft
// cap, and for scales that are not positive, under which the largest product is not the largest logit: then exponent is
// 1, and s is product * q.k, or cap * tanh(product * q.k / 2 log2(e)).
struct FoldedLogits {
    float exponent, product, cap;

    __device__ __forceinline__ FoldedLogits(const FolioAttentionParams &p, u32 kv_head, u32 request) {
        const float scale = product_scale(p, kv_head, request);
        const bool capped = p.logits_soft_cap > 0.0f;
        const bool direct = !capped && scale > 0.0f;
        exponent = direct ? scale * LOG2_E : 1.0f;
        cap = capped ? p.logits_soft_cap * LOG2_E : 0.0f;
        product = direct ? 1.0f : capped ? 2 * LOG2_E * __fdividef(scale, p.logits_soft_cap) : scale * LOG2_E;
    }

    template <int N>
    __device__ __forceinline__ void transform(float (&s)[N]) const {
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] *= product;
        if (cap == 0.0f) return;
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = fmaf(-2 * cap, reciprocal_of_exp2_plus_1(s[i]), cap);
    }
};

}  // namespace folio
