// Soft caps in a kernel of their own: from products of a step to probabilities.
//
// Capped logits are bounded. So exponentials need no maximum of a row: they are taken relative to a power of two that is
// the same for all. The comparisons that this saves are part of the time for tanh by a polynomial, which belongs to the
// exponent. Registers only; the layout of logits is softmax.cuh's.
#pragma once

#include "core/logits.cuh"
#include "sm90/prefill/softmax.cuh"

namespace folio::prefill {

// Polynomials for tanh(x) up to `TO`, of odd powers of x. Their errors are below 1e-6.
struct NearTanh {
    static constexpr int TERMS = 3;
    static constexpr float TO = 0.38f, FACTORS[TERMS] = {0.99998424f, -0.33244488f, 0.12068123f};
};
struct FarTanh {
    static constexpr int TERMS = 6;
    static constexpr float TO = 1.1f, FACTORS[TERMS] = {0.99999216f,  -0.33313901f, 0.13194175f,
                                                        -0.04957426f, 0.0146902f,   -0.00231711f};
};

// Sums of squares of a thread's N products: bounds of their magnitudes, for half of what comparisons take. A sum is of ten at
// most: of more, it would exceed the bound for products that do not.
template <int N>
struct Squares {
    static constexpr int SUMS = N < 64 ? 4 : 8;
    float sums[SUMS];

    explicit __device__ __forceinline__ Squares(const float (&s)[N]) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i % SUMS] = i < SUMS ? s[i] * s[i] : fmaf(s[i], s[i], sums[i % SUMS]);
    }

    // Whether those of all of a warp's products are. Not so for NaN.
    __device__ __forceinline__ bool all_within(float most) const {
        bool within = true;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) within = within && sums[i] <= most;
        return __all_sync(FULL_WARP, within);
    }
};

// Logits in base 2 of a tile: cap * log2(e) * tanh(k s) as s times a polynomial of s^2, whose factors have those of k.
template <class Tanh>
struct CapSeries {
    float factors[Tanh::TERMS];
    float most_squares;  // for which it holds

    CapSeries() = default;

    __device__ __forceinline__ CapSeries(const FolioAttentionParams &params, const Tile &tile) {
        const float cap = params.logits_soft_cap, k = __fdividef(tile.product_scale(params), cap);
        float factor = k * cap * LOG2_E;
#pragma unroll
        for (int t = 0; t < Tanh::TERMS; ++t) {
            factors[t] = Tanh::FACTORS[t] * factor;
            factor *= k * k;
        }
        const float farthest = __fdividef(Tanh::TO, k);
        // Else powers of k are not numbers, or lose digits.
        const float last = fabsf(factors[Tanh::TERMS - 1]);
        const bool holds = last > 1e-36f && last < 1e36f;
        most_squares = holds ? farthest * farthest : -1.0f;
    }

    __device__ __forceinline__ float exponent(float s, float reference) const {
        const float u = s * s;
        float polynomial = factors[Tanh::TERMS - 1];
#pragma unroll
        for (int t = Tanh::TERMS - 2; t >= 0; --t) polynomial = fmaf(polynomial, u, factors[t]);
        return fmaf(s, polynomial, -reference);
    }
};

// The softmax state of the thread's two rows under a cap of at most 64: of exponentials relative to 2^REFERENCE, none of
// which is 0, and 2^30 of which have a sum.
struct CappedRows {
    static constexpr float REFERENCE = 32.0f;
    float row_max[2] = {REFERENCE, REFERENCE}, sum[2] = {};

    // s becomes exp2(logit - REFERENCE). `hide` masks logits of a block of which not all keys are seen.
    template <int N, class Hide>
    __device__ __forceinline__ void add(float (&s)[N], const CapSeries<NearTanh> &near,
                                        const FolioAttentionParams &params, const Tile &tile, bool hides,
                                        const Hide &hide) {
        const Squares<N> squares(s);
        const bool is_near = squares.all_within(near.most_squares);
        if (is_near && !hides) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                s[i] = exp2_approx(near.exponent(s[i], REFERENCE));
                sum[i / 2 % 2] += s[i];
            }
            return;
        }
        if (is_near) {
            take_exponents(s, near);
        } else {
            take_wider_exponents(s, squares, params, tile);
        }
        if (hides) hide(s);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            s[i] = exp2_approx(s[i]);
            sum[i / 2 % 2] += s[i];
        }
    }

private:
    template <int N, class Tanh>
    static __device__ __forceinline__ void take_exponents(float (&s)[N], const CapSeries<Tanh> &series) {
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = series.exponent(s[i], REFERENCE);
    }

    template <int N>
    static __device__ __forceinline__ void take_wider_exponents(float (&s)[N], const Squares<N> &squares,
                                                                const FolioAttentionParams &params, const Tile &tile) {
        const CapSeries<FarTanh> far(params, tile);
        if (squares.all_within(far.most_squares)) return take_exponents(s, far);
        FoldedLogits(params, tile.kv_head, tile.request.index).transform(s);
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] -= REFERENCE;
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
