// The softmax of one warpgroup of the Hopper prefill kernel on wgmma accumulators: a thread holds two rows,
// row(0) = 16 warp + lane / 4 and row(1) = row(0) + 8, of each of them columns 8 j + 2 (lane % 4) + {0, 1} in
// s[4 j + 2 row + {0, 1}]; a row is spread over the four lanes of a quad. Registers only.
#pragma once

#include "core/softmax.cuh"
#include "sm90/prefill/tile.cuh"

namespace folio::prefill {

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// The thread's first row within the tile.
__device__ __forceinline__ u32 first_row() { return (threadIdx.x - WARPGROUP) / 32 * 16 + threadIdx.x % 32 / 4; }

// Keys from `end` on become -inf, or those before `begin`; both count from the first key of the block.
template <int N>
__device__ __forceinline__ void mask_right(float (&s)[N], int row, int end) {
#pragma unroll
    for (int i = 2 * row; i < N; i += i % 2 == 0 ? 1 : 3) {
        if (8 * (i / 4) + i % 2 >= end) s[i] = minus_infinity();
    }
}

template <int N>
__device__ __forceinline__ void mask_left(float (&s)[N], int row, int begin) {
#pragma unroll
    for (int i = 2 * row; i < N; i += i % 2 == 0 ? 1 : 3) {
        if (8 * (i / 4) + i % 2 < begin) s[i] = minus_infinity();
    }
}

// Masks what the thread's rows must not see of a block: keys outside their span, or past the end.
template <int N>
__device__ __forceinline__ void mask_keys(float (&s)[N], const FolioAttentionParams &params, const Tile &tile,
                                          int block, bool right, bool left) {
    const Window<i32> window(params);
    const int first_column = block * BLOCK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int position = tile.position + static_cast<int>(first_row() + 8 * r >> tile.pack_shift);
        if (right) mask_right(s, r, min(tile.kv_end, window.end(position)) - first_column);
        if (left) mask_left(s, r, window.begin(position) - first_column);
    }
}

// Two rows on their way through the keys: exponentials are taken relative to 2^offset, and `sum` is this
// thread's share of theirs. The offset may lag behind the largest logit by LAG: raising it costs a pass over
// the output, leaving it costs nothing but range. A product above `limit` makes it rise.
struct Rows {
    static constexpr float LAG = 8.0f;
    float limit[2] = {minus_infinity(), minus_infinity()};
    float offset[2] = {}, sum[2] = {};

    // s becomes exp2(s scale - offset). True if the output must be multiplied by `rescale`.
    template <int N>
    __device__ __forceinline__ bool update(float (&s)[N], float scale, float (&rescale)[2]) {
        float largest[2];
        block_max(s, largest);
        const bool rises = __any_sync(FULL_WARP, largest[0] > limit[0] || largest[1] > limit[1]);
        if (rises) raise(largest, scale, rescale);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const int r = i / 2 % 2;
            s[i] = exp2_approx(fmaf(s[i], scale, -offset[r]));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], scale, -offset[r]));
            sum[r] += s[i] + s[i + 1];
        }
        return rises;
    }

private:
    template <int N>
    static __device__ __forceinline__ void block_max(const float (&s)[N], float (&largest)[2]) {
        largest[0] = fmaxf(s[0], s[1]);
        largest[1] = fmaxf(s[2], s[3]);
#pragma unroll
        for (int i = 4; i < N; i += 4) {
            largest[0] = fmaxf(largest[0], fmaxf(s[i], s[i + 1]));
            largest[1] = fmaxf(largest[1], fmaxf(s[i + 2], s[i + 3]));
        }
    }

    __device__ __forceinline__ void raise(float (&largest)[2], float scale, float (&rescale)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = quad_max(largest[r]);
            rescale[r] = 1.0f;
            if (largest[r] > limit[r]) {
                const float raised = largest[r] * scale;
                // The first keys of a row meet an offset of 0 that means nothing.
                rescale[r] = limit[r] == minus_infinity() ? 0.0f : exp2_approx(offset[r] - raised);
                offset[r] = raised;
                limit[r] = largest[r] + LAG * reciprocal_approx(scale);
                sum[r] *= rescale[r];
            }
        }
    }
};

template <int N>
__device__ __forceinline__ void pack_probabilities(u32 (&p)[N], const float (&s)[2 * N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) p[i] = Element::pack(s[2 * i], s[2 * i + 1]);
}

// What a row's output is multiplied by, and its log-sum-exp in base 2.
struct RowEnd {
    float weight, lse;

    // `sum` of exponentials relative to 2^offset, 0 where the row saw nothing; `sink` in units of log2.
    __device__ __forceinline__ RowEnd(float offset, float sum, float sink) {
        const float top = fmaxf(sum > 0.0f ? offset : minus_infinity(), sink);
        const float base = top == minus_infinity() ? 0.0f : top;
        const float lowered = exp2_approx(offset - base);
        const float total = fmaf(sum, lowered, exp2_approx(sink - base));
        weight = total > 0.0f ? lowered * reciprocal_approx(total) : 0.0f;
        lse = base + log2_approx(total);
    }
};

}  // namespace folio::prefill
