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

// The thread's first row within the tile that the record is of.
__device__ __forceinline__ u32 first_row() {
    return (OWN_KEYS ? threadIdx.x % WARPGROUP : threadIdx.x - WARPGROUP) / 32 * 16 + threadIdx.x % 32 / 4;
}

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

// Masks what the thread's rows must not see of a block: keys outside their span, or past an end.
template <int N>
__device__ __forceinline__ void mask_keys(float (&s)[N], const FolioAttentionParams &params, const Tile &tile,
                                          int block, bool right, bool left) {
    const Window<i32> window(params);
    const int first_column = block * BLOCK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int position = tile.position + static_cast<int>(position_of(packing_of(params), first_row() + 8 * r));
        if (right) mask_right(s, r, min(tile.end_in(block, tile.kv_end), window.end(position)) - first_column);
        if (left) mask_left(s, r, window.begin(position) - first_column);
    }
}

// The softmax state of the thread's two rows: exponentials are taken relative to 2^row_max, and `sum` is this thread's
// share of theirs. The maximum may lag behind the largest logit by RESCALE_THRESHOLD: to rescale costs a pass over the
// output, not to costs only range. A product above `rescale_above` makes it follow.
struct Rows {
    static constexpr float RESCALE_THRESHOLD = 8.0f;
    float rescale_above[2] = {minus_infinity(), minus_infinity()};
    float row_max[2] = {}, sum[2] = {};

    // Goes on from rows that came to `lse` over other keys, and to an output that is not zero.
    __device__ __forceinline__ void begin(const float (&lse)[2], const float (&scale)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (lse[r] == minus_infinity()) continue;
            row_max[r] = lse[r];
            rescale_above[r] = (lse[r] + RESCALE_THRESHOLD) * reciprocal_approx(scale[r]);
            // A quad's shares together are 1.
            sum[r] = threadIdx.x % 4 == 0 ? 1.0f : 0.0f;
        }
    }

    // s becomes exp2(s scale - row_max), `offset` being added to s where logits have a bias. True if the output must be
    // multiplied by `factor`.
    template <int N>
    __device__ __forceinline__ bool update(float (&s)[N], const float (&scale)[2], const float (&offset)[2],
                                           float (&factor)[2]) {
        float largest[2], base[2];
        block_max(s, largest);
        if constexpr (BIASED) {
            largest[0] += offset[0];
            largest[1] += offset[1];
        }
        const bool rescales = __any_sync(FULL_WARP, largest[0] > rescale_above[0] || largest[1] > rescale_above[1]);
        if (rescales) rescale(largest, scale, factor);
#pragma unroll
        for (int r = 0; r < 2; ++r) base[r] = BIASED ? fmaf(offset[r], scale[r], -row_max[r]) : -row_max[r];
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const int r = i / 2 % 2;
            s[i] = exp2_approx(fmaf(s[i], scale[r], base[r]));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], scale[r], base[r]));
            sum[r] += s[i] + s[i + 1];
        }
        return rescales;
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

    __device__ __forceinline__ void rescale(float (&largest)[2], const float (&scale)[2], float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = quad_max(largest[r]);
            factor[r] = 1.0f;
            if (largest[r] > rescale_above[r]) {
                const float new_max = largest[r] * scale[r];
                // At the first keys of a row, row_max is 0 and means nothing.
                factor[r] = rescale_above[r] == minus_infinity() ? 0.0f : exp2_approx(row_max[r] - new_max);
                row_max[r] = new_max;
                rescale_above[r] = largest[r] + RESCALE_THRESHOLD * reciprocal_approx(scale[r]);
                sum[r] *= factor[r];
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

    // `sum` of exponentials relative to 2^row_max, 0 where the row saw nothing; `sink` in units of log2.
    __device__ __forceinline__ RowEnd(float row_max, float sum, float sink) {
        const float top = fmaxf(sum > 0.0f ? row_max : minus_infinity(), sink);
        const float base = top == minus_infinity() ? 0.0f : top;
        const float lowered = exp2_approx(row_max - base);
        const float total = fmaf(sum, lowered, exp2_approx(sink - base));
        weight = total > 0.0f ? lowered * reciprocal_approx(total) : 0.0f;
        lse = base + log2_approx(total);
    }
};

}  // namespace folio::prefill
