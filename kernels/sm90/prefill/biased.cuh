// ALiBi in a kernel of its own: the bias of logits by distance, where masks follow from positions and a query head has one
// slope for all requests. Registers only; the layout of logits is softmax.cuh's.
//
// The distance of a key is that of the block's first key less a constant: a logit takes one multiplication, and the block's
// own bias is part of what a row's exponents are taken relative to.
#pragma once

#include "sm90/prefill/softmax.cuh"

namespace folio::prefill {

// Of the thread's two rows of a tile, in units of products: what is added for every token of distance.
struct Slopes {
    float slope[2];

    Slopes() = default;

    // `exponent` is what products are multiplied by later.
    __device__ __forceinline__ Slopes(const FolioAttentionParams &params, const Tile &tile, float exponent) {
        const float factor = -LOG2_E * reciprocal_approx(exponent);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            slope[r] = params.alibi_slopes[tile.head_of(first_row() + 8 * r)] * factor;
        }
    }

    // Adds the bias of a block but for `of_block`, which all of a row's keys have.
    template <int N>
    __device__ __forceinline__ void add(float (&s)[N], float (&of_block)[2], const Tile &tile, int block) const {
        const int first_column = block * BLOCK + 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int position = tile.position + static_cast<int>(tile.position_of(first_row() + 8 * r));
            of_block[r] = slope[r] * static_cast<float>(position - first_column);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = fmaf(slope[i / 2 % 2], -static_cast<float>(8 * (i / 4) + i % 2), s[i]);
    }
};

}  // namespace folio::prefill
