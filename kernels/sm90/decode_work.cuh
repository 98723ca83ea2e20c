// One instantiation of the decode kernel (types, shapes), and what a CTA and its lanes know of their work item:
// rows, visible keys, score rule. Nothing here touches keys or values.
#pragma once

#include "params.h"
#include "sm90/decode_load.cuh"
#include "sm90/decode_tile.cuh"

namespace folio {

#if defined(FOLIO_Q_BF16)
using QueryType = Bf16;
#else
using QueryType = F16;
#endif
#if defined(FOLIO_KV_E4M3)
using CacheType = E4m3;
#elif defined(FOLIO_KV_E5M2)
using CacheType = E5m2;
#else
using CacheType = QueryType;
#endif

using Op = Operands<CacheType>;
using Math = Op::Math;
using Shape = RingShape<FOLIO_DECODE_HEADS, FOLIO_DECODE_TILE, FOLIO_HEAD_DIM_QK * FOLIO_KV_BYTES,
                        FOLIO_HEAD_DIM_VO * FOLIO_KV_BYTES, FOLIO_DECODE_STAGES, FOLIO_DECODE_WARPS>;
using KTile = RowTile<Shape::kKRowBytes>;
using VTile = RowTile<Shape::kVRowBytes>;

constexpr int kHeadDimQk = FOLIO_HEAD_DIM_QK, kHeadDimVo = FOLIO_HEAD_DIM_VO;
constexpr int kTileTokens = Shape::kTileTokens;
constexpr int kWarps = Shape::kWarps, kThreads = 32 * kWarps;
constexpr int kHeads = Shape::kHeads;
// Eights of packed rows per KV head, and columns of the products altogether: one KV head with up to 16 rows, or two
// with up to 8 each.
constexpr int kRowTiles = FOLIO_DECODE_ROWS / 8;
constexpr int kRows = FOLIO_DECODE_ROWS;
constexpr int kColumnTiles = kHeads * kRowTiles;
constexpr float kLog2E = 1.4426950408889634f;

struct Item {
    FolioWorkItem work;
    FolioItemPlace place;
    // Rows first_row .. first_row + num_rows of the item's q_len x group, for each of the CTA's KV heads.
    unsigned kv_head, first_row, num_rows;
};

__device__ __forceinline__ Item read_item(const FolioAttentionParams &params, const FolioDecodeLaunch &launch,
                                          unsigned index) {
    Item item;
    const uint4 *words = reinterpret_cast<const uint4 *>(params.plan.items + index);
    const uint4 a = words[0], b = words[1], c = *reinterpret_cast<const uint4 *>(params.plan.places + index);
    item.work = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    item.place.page_start = static_cast<folio_i64>(static_cast<unsigned long long>(c.y) << 32 | c.x);
    item.place.q_token = static_cast<int>(c.z);
    item.place.position = static_cast<int>(c.w);
    item.kv_head = blockIdx.x * kHeads;
    item.first_row = blockIdx.y * kRows;
    const unsigned rows = item.work.q_len * launch.group_size;
    item.num_rows = rows <= item.first_row ? 0 : min(rows - item.first_row, static_cast<unsigned>(kRows));
    return item;
}

// Keys that the row at `position` sees, within the item.
__device__ __forceinline__ void visible_keys(const FolioAttentionParams &params, const Item &item, int position,
                                             int &begin, int &end) {
    const folio_i64 first = item.work.kv_start, last = item.work.kv_end, p = position;
    folio_i64 low = first, high = last;
    if (params.mask_mode == FOLIO_MASK_CAUSAL && p + 1 < high) {
        high = p + 1;
    }
    if (params.window_right >= 0 && p + params.window_right + 1 < high) {
        high = p + params.window_right + 1;
    }
    if (params.window_left >= 0 && p - params.window_left > low) {
        low = p - params.window_left;
    }
    begin = static_cast<int>(low < last ? low : last);
    end = static_cast<int>(high > first ? high : first);
}

// One packed row: its query row within the item, and its query head within the group.
struct PackedRow {
    unsigned query, head;
};

// Row `row` of the CTA; rows past the last repeat the last, and their results are dropped.
__device__ __forceinline__ PackedRow packed_row(const FolioDecodeLaunch &launch, const Item &item, unsigned row) {
    const unsigned packed = item.first_row + min(row, item.num_rows - 1);
    const unsigned query = packed / launch.group_size;
    return {query, packed - query * launch.group_size};
}

// The rows whose scores a lane holds: 8t + 2i and 8t + 2i + 1 for i = lane % 4, the same of every KV head.
struct LaneRows {
    int begin[kRowTiles][2], end[kRowTiles][2];  // visible keys
    int position[kRowTiles][2];
};

__device__ __forceinline__ LaneRows lane_rows(const FolioAttentionParams &params, const FolioDecodeLaunch &launch,
                                              const Item &item, unsigned lane) {
    LaneRows rows;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const PackedRow row = packed_row(launch, item, 8 * t + 2 * (lane & 3) + j);
            rows.position[t][j] = item.place.position + static_cast<int>(row.query);
            visible_keys(params, item, rows.position[t][j], rows.begin[t][j], rows.end[t][j]);
        }
    }
    return rows;
}

// Scores in base 2: scale, cap, then position bias; masked in the tile loop.
struct ScoreRule {
    float scale[kColumnTiles][2];  // per row, times log2(e)
    float slope[kColumnTiles][2];  // ALiBi slopes times log2(e)
    float cap, cap_rate;           // cap * log2(e), or 0; 2 / cap
    bool plain, alibi, alibi_sqrt;

    __device__ __forceinline__ float operator()(float score, int column_tile, int j, int distance) const {
        float x = score * scale[column_tile][j];
        if (cap != 0.f) {
            // tanh(y) = 1 - 2 / (1 + e^2y): exact to rounding where tanh.approx is not. x carries log2(e) already.
            x = cap - __fdividef(2.f * cap, 1.f + exp2_approx(x * cap_rate));
        }
        if (alibi) {
            const float d = static_cast<float>(distance);
            x -= slope[column_tile][j] * (alibi_sqrt ? sqrtf(fmaxf(d, 0.f)) : d);
        }
        return x;
    }
};

__device__ __forceinline__ ScoreRule score_rule(const FolioAttentionParams &params, const FolioDecodeLaunch &launch,
                                                const Item &item, unsigned lane) {
    ScoreRule rule;
    rule.cap = params.logits_soft_cap * kLog2E;
    rule.cap_rate = params.logits_soft_cap != 0.f ? 2.f / params.logits_soft_cap : 0.f;
    rule.alibi = params.alibi_slopes != nullptr;
    rule.alibi_sqrt = params.flags & FOLIO_RUN_ALIBI_SQRT;
    rule.plain = rule.cap == 0.f && !rule.alibi;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
        const unsigned kv_head = item.kv_head + c / kRowTiles;
        float scale = params.logits_scale * kLog2E;
        if (params.k_scales) {
            scale *= params.k_scales[static_cast<folio_i64>(kv_head) * params.k_scales_stride];
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            rule.scale[c][j] = scale;
            rule.slope[c][j] = 0.f;
            if (rule.alibi) {
                const PackedRow row = packed_row(launch, item, 8 * (c % kRowTiles) + 2 * (lane & 3) + j);
                rule.slope[c][j] = params.alibi_slopes[kv_head * launch.group_size + row.head] * kLog2E;
            }
        }
    }
    return rule;
}

// The keys that any row of the CTA sees, and [inner_begin, inner_end), those that all rows see.
struct TileSpan {
    KeySpan keys;
    int inner_begin, inner_end;
    int tiles;  // of this warp
};

__device__ __forceinline__ TileSpan tile_span(const FolioAttentionParams &params, const FolioDecodeLaunch &launch,
                                              const Item &item, unsigned warp) {
    TileSpan span;
    // Later rows of a request see no less at the end and no more at the beginning.
    const int first = item.place.position + static_cast<int>(item.first_row / launch.group_size);
    const int last =
        item.place.position + static_cast<int>((item.first_row + item.num_rows - 1) / launch.group_size);
    visible_keys(params, item, first, span.keys.begin, span.inner_end);
    visible_keys(params, item, last, span.inner_begin, span.keys.end);
    span.keys.page_ids = params.plan.page_ids + item.place.page_start;
    span.keys.first = span.keys.begin / kTileTokens * kTileTokens;
    span.keys.head = item.kv_head;
    const int all = span.keys.end <= span.keys.begin
                        ? 0 : (span.keys.end - span.keys.first + kTileTokens - 1) / kTileTokens;
    const int mine = all - static_cast<int>(warp);
    span.tiles = mine <= 0 ? 0 : (mine + kWarps - 1) / kWarps;
    return span;
}

}  // namespace folio
