// The online softmax of a consumer warpgroup over its tiles, and the state that it leaves at the end of a unit.
//
// Tokens are the rows of the score accumulators, so a maximum is over all four warps. It is agreed on only where some
// score exceeds the old one by RESCALE_THRESHOLD: a vote per tile, which also says that the tile before has been read.
#pragma once

#include "core/softmax.cuh"
#include "sm90/mla_few/products.cuh"
#include "sm90/mla_few/query.cuh"

namespace folio::mla_few {

// Below every finite score in base 2, and finite, so that a difference of two maxima is never NaN.
constexpr float NO_MAX = -1e30f;
// A row maximum is kept until a score exceeds it by this much: weights stay below 2^8.
constexpr float RESCALE_THRESHOLD = 8.0f;
// A block's reference scale is kept until a token's is so many times larger: scaled weights stay below 2^12, in fp16.
constexpr float SCALE_THRESHOLD = 16.0f;

constexpr u32 GROUP_THREADS = 128;

// In shared memory.
template <class Format>
struct Statistics {
    float powers[ROWS];                      // what query rows were divided by
    float warp_max[CONSUMERS][4][ROWS];      // for agreeing on maxima
    float warp_scale[CONSUMERS][4][BLOCKS];  // and on reference scales
    float max[CONSUMERS][ROWS];              // at the end of a unit
    float sum[CONSUMERS][4][ROWS];
    float factor[CONSUMERS][ROWS];  // what sums are multiplied by then (16-bit records)
};

// The row of a lane's accumulators with index n = 2 j + c.
__device__ __forceinline__ u32 lane_row(int n, u32 lane) { return n / 2 * 8 + 2 * (lane % 4) + n % 2; }

template <class Format>
class Softmax {
    using P = Products<Format>;
    static constexpr bool SCALED = Format::SCALED;

public:
    float o[OUTPUT_TILES][8];
    float max[4], sum[4];
    float reference[BLOCKS];  // of fp8_ds_mla: what the scales in the weights are relative to

    // After the unit's queries are in shared memory.
    __device__ __forceinline__ void begin(const FolioMlaFewParams &params, const Unit &unit,
                                          const Statistics<Format> &shared, u32 lane) {
        const FolioAttentionParams &p = params.mla.attention;
        const float factor = p.logits_scale * LOG2_E;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const u32 row = lane_row(n, lane);
            keys[n] = row_keys(params, unit, token_head(params, unit, row).token);
            scales.latent[n] = factor * shared.powers[row];
            scales.rope[n] = factor;
            max[n] = NO_MAX;
            sum[n] = 0.0f;
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) reference[b] = 0.0f;
#pragma unroll
        for (int j = 0; j < OUTPUT_TILES; ++j) {
#pragma unroll
            for (int i = 0; i < 8; ++i) o[j][i] = 0.0f;
        }
    }

    // `token` is the first of the 64 that the tile is part of. `weights` is the group's own memory.
    __device__ __forceinline__ void add_tile(const TileView &tile, i32 token, u32 queries, u32 weights,
                                             Statistics<Format> &shared, u32 group, u32 warp, u32 lane) {
        float s[8];
        const KeyRange tile_keys = {token + static_cast<i32>(16 * tile.begin), token + static_cast<i32>(16 * tile.end)};
        const i32 first = token + static_cast<i32>(16 * warp + lane / 4);
        if constexpr (SCALED) read_scales(tile, first, tile_keys, warp, lane);
        P::scores(s, tile, queries, scales, warp, lane);
        bool stale = false;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int n = i / 4 * 2 + i % 2;
            const i32 key = first + i / 2 % 2 * 8;
            if (!keys[n].holds(key) || !tile_keys.holds(key)) s[i] = minus_infinity();
            stale |= s[i] > max[n] + RESCALE_THRESHOLD;
        }
        if constexpr (SCALED) stale |= exceeds_reference();
        if (group_any(1 + group, GROUP_THREADS, stale)) rescale(s, shared, group, warp, lane);
        weigh(s, weights, warp, lane);
        fence_proxy_async();
        group_sync(1 + group, GROUP_THREADS);
        P::add_values(o, tile, weights, warp, lane);
    }

private:
    __device__ __forceinline__ void read_scales(const TileView &tile, i32 first, KeyRange tile_keys, u32 warp,
                                                u32 lane) {
        const u32 record = (warp < 2 ? tile.first : tile.second) + (warp % 2 * 16 + lane / 4) * Format::PITCH;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // Beyond the tile there is another token's record, or half of one.
            const bool there = tile_keys.holds(first + 8 * r);
            const float4 scale = ld_shared_f4(record + 8 * r * Format::PITCH + Format::SCALES);
            scales.token[r] = there ? scale : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }

    static __device__ __forceinline__ float of_block(const float4 &x, int b) {
        return b == 0 ? x.x : b == 1 ? x.y : b == 2 ? x.z : x.w;
    }

    __device__ __forceinline__ float larger_scale(int b) const {
        return fmaxf(of_block(scales.token[0], b), of_block(scales.token[1], b));
    }

    __device__ __forceinline__ bool exceeds_reference() const {
        bool exceeds = false;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) exceeds |= larger_scale(b) > SCALE_THRESHOLD * reference[b];
        return exceeds;
    }

    // Agrees on maxima that take in the tile's scores, and brings what was accumulated to them.
    __device__ __forceinline__ void rescale(const float (&s)[8], Statistics<Format> &shared, u32 group, u32 warp,
                                            u32 lane) {
        float largest[4], scale[BLOCKS];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int i = n / 2 * 4 + n % 2;
            largest[n] = fmaxf(s[i], s[i + 2]);
#pragma unroll
            for (int lanes = 4; lanes <= 16; lanes *= 2) {
                largest[n] = fmaxf(largest[n], __shfl_xor_sync(FULL_WARP, largest[n], lanes));
            }
            if (lane < 4) shared.warp_max[group][warp][lane_row(n, lane)] = largest[n];
        }
        if constexpr (SCALED) {
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                scale[b] = larger_scale(b);
#pragma unroll
                for (int lanes = 4; lanes <= 16; lanes *= 2) {
                    scale[b] = fmaxf(scale[b], __shfl_xor_sync(FULL_WARP, scale[b], lanes));
                }
                if (lane == 0) shared.warp_scale[group][warp][b] = scale[b];
            }
        }
        group_sync(1 + group, GROUP_THREADS);
        float factor[4], shrink[BLOCKS];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            float most = max[n];
#pragma unroll
            for (int w = 0; w < 4; ++w) most = fmaxf(most, shared.warp_max[group][w][lane_row(n, lane)]);
            factor[n] = exp2_approx(max[n] - most);
            max[n] = most;
            sum[n] *= factor[n];
        }
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            shrink[b] = 1.0f;
            if constexpr (SCALED) {
                float most = reference[b];
#pragma unroll
                for (int w = 0; w < 4; ++w) most = fmaxf(most, shared.warp_scale[group][w][b]);
                shrink[b] = most > 0.0f ? reference[b] / most : 0.0f;
                reference[b] = most;
            }
        }
#pragma unroll
        for (int j = 0; j < OUTPUT_TILES; ++j) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                o[j][i] *= SCALED ? factor[i / 4 * 2 + i % 2] * shrink[j / 2] : factor[i / 4 * 2 + i % 2];
            }
        }
    }

    // Scores become weights, in the memory that add_values reads them from.
    __device__ __forceinline__ void weigh(float (&s)[8], u32 weights, u32 warp, u32 lane) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int n = i / 4 * 2 + i % 2;
            s[i] = exp2_approx(s[i] - max[n]);
            sum[n] += s[i];
        }
        // Matrix m of a store is tokens 8 r .. and rows 8 j .. for r = m % 2, j = m / 2.
        const u32 target = weights + (2 * warp + lane / 8 % 2) * 256 + lane / 16 * 128 + lane % 8 * 16;
        if constexpr (SCALED) {
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const float inverse = reference[b] > 0.0f ? 1.0f / reference[b] : 0.0f;
                const float scale[2] = {of_block(scales.token[0], b) * inverse, of_block(scales.token[1], b) * inverse};
                store(s, scale, target + b * Memory<Format>::WEIGHT_BYTES);
            }
        } else {
            const float one[2] = {1.0f, 1.0f};
            store(s, one, target);
        }
    }

    static __device__ __forceinline__ void store(const float (&s)[8], const float (&scale)[2], u32 target) {
        u32 pairs[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int i = m / 2 * 4 + m % 2 * 2;
            pairs[m] = Format::Math::pack(s[i] * scale[m % 2], s[i + 1] * scale[m % 2]);
        }
        stmatrix_x4_trans(target, pairs);
    }

    KeyRange keys[4];
    Scales scales;
};

}  // namespace folio::mla_few
