// Scales of tokens and heads, or of blocks of their elements, on their way to shared memory beside the tiles. What they do there
// is token_scales.cuh's and block_scales.cuh's. In other forms there are none.
//
// They are copied by cp.async, as many tiles ahead as rows: loads of a tile ahead would wait behind the rows of all stages.
#pragma once

#include "sm90/decode/rings.cuh"

namespace folio::decode {

// Where the scales of a token and head are in a stage; those of heads lie TILE_TOKENS tokens apart. One scale of a key is read
// together with that of the value.
struct ScalesOfStage {
    static constexpr u32 VALUES = TOKEN_SCALES ? KEY_SCALE_BYTES : HEADS * TILE_TOKENS * KEY_SCALE_BYTES;
    static constexpr u32 KEY_STEP = TOKEN_SCALES ? BYTES_BESIDE : KEY_SCALE_BYTES;
    static constexpr u32 VALUE_STEP = TOKEN_SCALES ? BYTES_BESIDE : VALUE_SCALE_BYTES;
};

// One of them: of a token and head, or of a block in e4m3.
template <bool OF_TOKEN>
struct ScaleOf {
    typedef float Type;
};
template <>
struct ScaleOf<false> {
    typedef u8 Type;
};

// A lane brings all scales of one token and head of each tile. Keys that no row sees get zeros.
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
            const u32 to = ring + stage * Shape::STAGE_BYTES_BESIDE;
            const u32 head = span.head + row / Shape::TILE_TOKENS;
            copy<KEY_SCALE_BYTES>(to + row * ScalesOfStage::KEY_STEP, params.cache.k, from, head, is_seen);
            copy<VALUE_SCALE_BYTES>(to + ScalesOfStage::VALUES + row * ScalesOfStage::VALUE_STEP, params.cache.v, from,
                                    head, is_seen);
        }
    }

private:
    typedef ScaleOf<TOKEN_SCALES>::Type Scale;

    template <int BYTES>
    static __device__ __forceinline__ void copy(u32 to, const FolioStoredTensor &t, const TokenPlace &from, u32 head,
                                                bool is_seen) {
        const i64 page = is_seen ? from.page : 0;
        const Scale *scales = static_cast<const Scale *>(t.scales) + page * t.scales_page +
                              from.token * t.scales_token + head * t.scales_head;
        const u32 bytes = TOKEN_SCALES ? BYTES : min(t.head_dim / SCALE_BLOCK, static_cast<u32>(BYTES));
        cp_async<BYTES>(to, scales, is_seen ? bytes : 0);
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
using TileLoader = typename TileLoaderOf<Shape, Rows, TOKEN_SCALES || BLOCK_SCALES>::Type;

}  // namespace folio::decode
