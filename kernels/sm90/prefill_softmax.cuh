// The softmax of one warpgroup of the Hopper prefill kernel on wgmma accumulators: a thread holds two rows,
// row(0) = 16 warp + lane / 4 and row(1) = row(0) + 8, of each of them columns 8 j + 2 (lane % 4) + {0, 1} in
// s[4 j + 2 row + {0, 1}]; a row is spread over the four lanes of a quad. Registers only.
#pragma once

#include "sm90/prefill_tile.cuh"

namespace folio::prefill {

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// tanh(x) = 1 - 2 / (exp(2 x) + 1): tanh.approx errs by 2^-11, which a cap of 50 makes 0.02 of a logit.
template <int N>
__device__ __forceinline__ void transform_products(float (&s)[N], const Tile &tile) {
    const float scale = tile.product_scale, cap = tile.soft_cap;
    if (cap > 0.0f) {
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = fmaf(-2 * cap, __fdividef(1.0f, exp2_approx(s[i] * scale) + 1.0f), cap);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] *= scale;
    }
}

// The thread's first row within the tile.
__device__ __forceinline__ unsigned first_row() {
    return (threadIdx.x - kWarpgroup) / 32 * 16 + threadIdx.x % 32 / 4;
}

// Keys outside the span of their row, and past the end, become -inf.
template <int N>
__device__ __forceinline__ void mask_keys(float (&s)[N], const FolioAttentionParams &params, const Tile &tile,
                                          int first_key) {
    const Span span(params);
    const int pack = packed_heads(params);
    const int first_column = first_key + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int position = tile.position + (static_cast<int>(first_row()) + 8 * r) / pack;
        const int end = min(tile.kv_end, position + span.right + 1) - first_column;
        const int begin = max(position - span.left, 0) - first_column;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int column = 8 * (i / 4) + i % 2;
            if (i / 2 % 2 == r && (column >= end || column < begin)) s[i] = -kInfinity;
        }
    }
}

// Running maximum (of logits before the exponent scale) and this thread's share of the sum of two rows. The
// maximum may lag behind the true one by 2^8 in the exponential: raising it costs a pass over the output,
// and leaving it costs nothing but range.
struct Rows {
    float max[2], sum[2];

    // s becomes exp2((s - max) scale), of the first block of keys.
    template <int N>
    __device__ __forceinline__ void start(float (&s)[N], float scale) {
        block_max(s, max);
        sum[0] = sum[1] = 0.0f;
        exponentials(s, scale);
    }

    // As start, for a further block. True if the output must be multiplied by `rescale`.
    template <int N>
    __device__ __forceinline__ bool update(float (&s)[N], float scale, float (&rescale)[2]) {
        constexpr float kLag = 8.0f;
        float raised[2];
        block_max(s, raised);
#pragma unroll
        for (int r = 0; r < 2; ++r) raised[r] = fmaxf(raised[r], max[r]);
        const bool rises = __any_sync(0xffffffffu, (raised[0] - max[0]) * scale > kLag ||
                                                       (raised[1] - max[1]) * scale > kLag);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float next = rises ? raised[r] : max[r];
            rescale[r] = exp2_approx(fmaf(max[r], scale, -offset(next, scale)));
            max[r] = next;
            sum[r] *= rescale[r];
        }
        exponentials(s, scale);
        return rises;
    }

private:
    // Rows that saw no key yet have the maximum -inf, and -inf - -inf is no number.
    static __device__ __forceinline__ float offset(float max, float scale) {
        return max == -kInfinity ? 0.0f : max * scale;
    }

    template <int N>
    static __device__ __forceinline__ void block_max(const float (&s)[N], float (&m)[2]) {
        m[0] = s[0];
        m[1] = s[2];
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            m[0] = fmaxf(m[0], fmaxf(s[i], s[i + 1]));
            m[1] = fmaxf(m[1], fmaxf(s[i + 2], s[i + 3]));
        }
        m[0] = quad_max(m[0]);
        m[1] = quad_max(m[1]);
    }

    template <int N>
    __device__ __forceinline__ void exponentials(float (&s)[N], float scale) {
        const float offsets[2] = {offset(max[0], scale), offset(max[1], scale)};
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            s[i] = exp2_approx(fmaf(s[i], scale, -offsets[i / 2 % 2]));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], scale, -offsets[i / 2 % 2]));
            sum[i / 2 % 2] += s[i] + s[i + 1];
        }
    }
};

template <int N>
__device__ __forceinline__ void pack_probabilities(unsigned (&p)[N], const float (&s)[2 * N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
}

// What a row's output is multiplied by, and its log-sum-exp in base 2.
struct RowEnd {
    float weight, lse;

    // `max` and `sink` are in units of log2; a row that saw nothing has max = -inf and sum = 0.
    __device__ __forceinline__ RowEnd(float max, float sum, float sink) {
        const float top = fmaxf(max, sink);
        if (top == -kInfinity) {
            weight = 0.0f;
            lse = -kInfinity;
            return;
        }
        const float lowered = exp2_approx(max - top);
        const float total = fmaf(sum, lowered, exp2_approx(sink - top));
        weight = __fdividef(lowered, total);
        lse = top + log2_approx(total);
    }
};

}  // namespace folio::prefill
