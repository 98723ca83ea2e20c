// What scales of tokens and heads do to scores and weights. In other forms it is nothing.
#pragma once

#include "sm90/decode/scale_loader.cuh"

namespace folio::decode {

// The scales of a lane's tokens: 16 t + 8 n + lane / 4 of a tile, of each of the CTA's KV heads.
class TokenFactors {
public:
    __device__ __forceinline__ TokenFactors(u32 stage, u32 lane) {
        if constexpr (TOKEN_SCALES) {
#pragma unroll
            for (int h = 0; h < HEADS; ++h) {
#pragma unroll
                for (int t = 0; t < TILE_TOKENS / 16; ++t) {
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const uint2 two = ld_shared_v2(stage + (h * TILE_TOKENS + 16 * t + 8 * n + lane / 4) * 8);
                        key[h][t][n] = __uint_as_float(two.x);
                        value[h][t][n] = __uint_as_float(two.y);
                        log_value[h][t][n] = log2_approx(fminf(fmaxf(fabsf(value[h][t][n]), 0x1p-64f), 0x1p64f));
                    }
                }
            }
        }
    }

    // Products become those of what the cache holds.
    __device__ __forceinline__ void scale(float (&s)[COLUMN_TILES][TILE_TOKENS / 16][4]) const {
        if constexpr (TOKEN_SCALES) {
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
                for (int t = 0; t < TILE_TOKENS / 16; ++t) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[c][t][i] *= key[c / ROW_TILES][t][i >> 1];
                }
            }
        }
    }

    // Of the probability of a score times the scale of its value. It is the largest of these that fp16 is to hold, and not
    // the largest probability, so that scales may be of any size; the sum of probabilities, in fp32, has room for what
    // 2^-64 to 2^64 make of it.
    __device__ __forceinline__ float log_weight(float score, int c, int t, int n) const {
        return TOKEN_SCALES ? score + log_value[c / ROW_TILES][t][n] : score;
    }

    __device__ __forceinline__ float weight(float probability, int c, int t, int n) const {
        return TOKEN_SCALES ? probability * value[c / ROW_TILES][t][n] : probability;
    }

private:
    float key[HEADS][TILE_TOKENS / 16][2], value[HEADS][TILE_TOKENS / 16][2], log_value[HEADS][TILE_TOKENS / 16][2];
};

}  // namespace folio::decode
