// Scales of tokens and heads: on their way to shared memory beside the tiles, and what they do to scores and weights. In other
// forms all of it is nothing.
//
// Stages of scales are [KV head][token][of the key, of the value]. They are copied by cp.async, as many tiles ahead as rows:
// loads of a tile ahead would wait behind the rows of all stages.
#pragma once

#include "sm90/decode/rings.cuh"

namespace folio::decode {

// A lane brings both scales of one token and head of each tile. Keys that no row sees get zeros.
template <class Shape>
class ScaleLoader {
public:
    __device__ __forceinline__ ScaleLoader(const FolioStoredDecodeParams &params, u32 ring, WarpPlace place, u32 lane)
        : params(params), ring(ring), place(place), lane(lane) {}

    __device__ __forceinline__ void begin(const KeySpan &span, int tiles) {
        this->span = span;
        this->tiles = place.row_group == 0 ? tiles : 0;
    }

    // Of tile `i`, which is the current one of `rows`.
    template <class Rows>
    __device__ __forceinline__ void issue(int i, int stage, const Rows &rows) const {
        if (i >= tiles) return;
        const u32 in_tile = lane % Shape::TILE_TOKENS;
        const TokenPlace from = rows.place_of(i, in_tile);
        const int token = span.first +
                          (i * Shape::KEY_GROUPS + static_cast<int>(place.key_group)) * Shape::TILE_TOKENS +
                          static_cast<int>(in_tile);
        const bool is_seen = from.page >= 0 && token >= span.begin && token < span.end;
#pragma unroll
        for (u32 first = 0; first < Shape::HEADS * Shape::TILE_TOKENS; first += 32) {
            const u32 row = first + lane;
            if (row >= Shape::HEADS * Shape::TILE_TOKENS) break;
            const u32 to = ring + stage * Shape::STAGE_BYTES_BESIDE + row * 8;
            const u32 head = span.head + row / Shape::TILE_TOKENS;
            copy(to, params.cache.k, from, head, is_seen);
            copy(to + 4, params.cache.v, from, head, is_seen);
        }
    }

private:
    static __device__ __forceinline__ void copy(u32 to, const FolioStoredTensor &t, const TokenPlace &from, u32 head,
                                                bool is_seen) {
        const i64 page = is_seen ? from.page : 0;
        const float *scale = static_cast<const float *>(t.scales) + page * t.scales_page + from.token * t.scales_token +
                             head * t.scales_head;
        cp_async<4>(to, scale, is_seen ? 4 : 0);
    }

    const FolioStoredDecodeParams &params;
    u32 ring;
    WarpPlace place;
    u32 lane;
    KeySpan span;
    int tiles;
};

// Brings scales together with the rows of `Rows`.
template <class Shape, class Rows>
class ScaledTileLoader {
public:
    static constexpr bool ZERO_FILLS_ROWS = Rows::ZERO_FILLS_ROWS;

    __device__ __forceinline__ ScaledTileLoader(const TensorMap *k_map, const TensorMap *v_map,
                                                const FolioPaddedDecodeParams &params, u32 ring, u32 beside,
                                                u32 barriers, WarpPlace place, u32 lane)
        : rows(k_map, v_map, params, ring, barriers, place, lane),
          scales(stored_params(params), beside, place, lane),
          place(place) {}

    __device__ __forceinline__ void begin(const KeySpan &span, int tiles) {
        scales.begin(span, tiles);
        rows.begin(span, tiles);
    }

    // Rows that come by cp.async close the group that scales are in.
    __device__ __forceinline__ void issue(int i, int stage) {
        rows.advance(i);
        scales.issue(i, stage, rows);
        if constexpr (!Rows::BY_CP_ASYNC) cp_async_commit();
        rows.issue(i, stage);
    }

    __device__ __forceinline__ void wait(int stage, u32 parity) const {
        if constexpr (!Rows::BY_CP_ASYNC) {
            cp_async_wait<Shape::STAGES - 1>();
            place.sync_group<Shape>();
        }
        rows.wait(stage, parity);
    }

private:
    Rows rows;
    ScaleLoader<Shape> scales;
    WarpPlace place;
};

// Brings rows alone.
template <class Shape, class Rows>
class PlainTileLoader : public Rows {
public:
    __device__ __forceinline__ PlainTileLoader(const TensorMap *k_map, const TensorMap *v_map,
                                               const FolioPaddedDecodeParams &params, u32 ring, u32, u32 barriers,
                                               WarpPlace place, u32 lane)
        : Rows(k_map, v_map, params, ring, barriers, place, lane) {}

    __device__ __forceinline__ void issue(int i, int stage) {
        this->advance(i);
        Rows::issue(i, stage);
    }
};

template <class Shape, class Rows, bool SCALED>
struct TileLoaderOf {
    typedef PlainTileLoader<Shape, Rows> Type;
};
template <class Shape, class Rows>
struct TileLoaderOf<Shape, Rows, true> {
    typedef ScaledTileLoader<Shape, Rows> Type;
};
template <class Shape, class Rows>
using TileLoader = typename TileLoaderOf<Shape, Rows, TOKEN_SCALES>::Type;

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
