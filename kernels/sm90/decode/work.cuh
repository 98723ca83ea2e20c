// One instantiation of the decode kernel (types, shapes), and what a CTA and its lanes know of their work item:
// rows, visible keys, score rule. Nothing here touches keys or values.
#pragma once

#include "core/softmax.cuh"
#include "sm90/decode/load.cuh"
#include "sm90/decode/tile.cuh"

namespace folio::decode {

using QueryType = FOLIO_Q;
using CacheType = FOLIO_KV;
using Op = Operands<CacheType>;
using Math = Op::Math;
using Shape = RingShape<FOLIO_DECODE_HEADS, FOLIO_KV_TILE, FOLIO_HEAD_DIM_QK, FOLIO_HEAD_DIM_VO,
                        sizeof(CacheType::Storage), FOLIO_THREADS / 32>;
using KTile = RowTile<Shape::K_ROW_BYTES>;
using VTile = RowTile<Shape::V_ROW_BYTES>;

constexpr int HEAD_DIM_QK = FOLIO_HEAD_DIM_QK, HEAD_DIM_VO = FOLIO_HEAD_DIM_VO;
constexpr int TILE_TOKENS = Shape::TILE_TOKENS;
constexpr int WARPS = Shape::WARPS, THREADS = FOLIO_THREADS;
constexpr int HEADS = Shape::HEADS;
// Packed rows per KV head, in eights, and the columns of the products altogether: one KV head with up to 16 rows, or
// two with up to 8 each.
constexpr int ROWS = FOLIO_Q_TILE, ROW_TILES = ROWS / 8;
constexpr int COLUMN_TILES = HEADS * ROW_TILES;

struct Item {
    FolioWorkItem work;
    FolioItemPlace place;
    // Rows first_row .. first_row + num_rows of the item's q_len x group, for each of the CTA's KV heads.
    u32 kv_head, first_row, num_rows;
};

__device__ __forceinline__ Item read_item(const FolioDecodeParams &params, u32 index) {
    Item item;
    const FolioPlanView &plan = params.attention.plan;
    const uint4 *words = reinterpret_cast<const uint4 *>(plan.items + index);
    const uint4 a = words[0], b = words[1], c = *reinterpret_cast<const uint4 *>(plan.places + index);
    item.work = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    item.place.page_start = static_cast<i64>(static_cast<u64>(c.y) << 32 | c.x);
    item.place.q_token = static_cast<i32>(c.z);
    item.place.position = static_cast<i32>(c.w);
    item.kv_head = blockIdx.x * HEADS;
    item.first_row = blockIdx.y * ROWS;
    const u32 rows = item.work.q_len * params.group_size;
    item.num_rows = rows <= item.first_row ? 0 : min(rows - item.first_row, static_cast<u32>(ROWS));
    return item;
}

// Keys of the item that the row at `position` sees.
__device__ __forceinline__ KeyRange row_keys(const FolioAttentionParams &params, const Item &item, i32 position) {
    const i64 first = item.work.kv_start, last = item.work.kv_end, p = position;
    i64 begin = first, end = last;
    if (params.mask_mode == FOLIO_MASK_CAUSAL) end = min(end, p + 1);
    if (params.window_right >= 0) end = min(end, p + params.window_right + 1);
    if (params.window_left >= 0) begin = max(begin, p - params.window_left);
    return {static_cast<i32>(min(begin, last)), static_cast<i32>(max(end, first))};
}

// One packed row: its query row within the item, and its query head within the group.
struct PackedRow {
    u32 query, head;
};

// Row `row` of the CTA; rows past the last repeat the last, and their results are dropped.
__device__ __forceinline__ PackedRow packed_row(const FolioDecodeParams &params, const Item &item, u32 row) {
    const u32 packed = item.first_row + min(row, item.num_rows - 1);
    const u32 query = packed / params.group_size;
    return {query, packed - query * params.group_size};
}

// The rows whose scores a lane holds: 8t + 2i and 8t + 2i + 1 for i = lane % 4, the same of every KV head.
struct LaneRows {
    KeyRange keys[ROW_TILES][2];
    i32 position[ROW_TILES][2];

    __device__ __forceinline__ LaneRows(const FolioDecodeParams &params, const Item &item, u32 lane) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const PackedRow row = packed_row(params, item, 8 * t + 2 * (lane & 3) + j);
                position[t][j] = item.place.position + static_cast<i32>(row.query);
                keys[t][j] = row_keys(params.attention, item, position[t][j]);
            }
        }
    }
};

// Scores in base 2: scale, cap, then position bias; masked in the tile loop.
struct ScoreRule {
    float scale[COLUMN_TILES][2];  // per row, with log2(e), or with 1 / cap
    float slope[COLUMN_TILES][2];  // ALiBi slopes, with log2(e)
    float cap;                     // with log2(e), or 0
    bool plain, alibi, alibi_sqrt;

    __device__ __forceinline__ ScoreRule(const FolioDecodeParams &params, const Item &item, u32 lane) {
        const FolioAttentionParams &p = params.attention;
        cap = p.logits_soft_cap > 0.0f ? p.logits_soft_cap * LOG2_E : 0.0f;
        alibi = p.alibi_slopes != nullptr;
        alibi_sqrt = p.flags & FOLIO_RUN_ALIBI_SQRT;
        plain = cap == 0.0f && !alibi;
        const float unit = cap > 0.0f ? 1.0f / p.logits_soft_cap : LOG2_E;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            const u32 kv_head = item.kv_head + c / ROW_TILES;
            const float factor = p.logits_scale * head_scale(p.k_scales, p.k_scales_stride, kv_head) * unit;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                scale[c][j] = factor;
                slope[c][j] = 0.0f;
                if (alibi) {
                    const PackedRow row = packed_row(params, item, 8 * (c % ROW_TILES) + 2 * (lane & 3) + j);
                    slope[c][j] = p.alibi_slopes[kv_head * params.group_size + row.head] * LOG2_E;
                }
            }
        }
    }

    // `distance` is from the key to the row.
    __device__ __forceinline__ float operator()(float score, int column_tile, int j, i32 distance) const {
        float x = score * scale[column_tile][j];
        if (cap > 0.0f) x = cap * tanh_exact(x);
        if (alibi) {
            const float d = static_cast<float>(distance);
            x -= slope[column_tile][j] * (alibi_sqrt ? sqrtf(fmaxf(d, 0.0f)) : d);
        }
        return x;
    }
};

// The keys that any row of the CTA sees, and those that all rows see.
struct TileSpan {
    KeySpan keys;
    KeyRange inner;
    i32 tiles;  // of this warp

    __device__ __forceinline__ TileSpan(const FolioDecodeParams &params, const Item &item, u32 warp) {
        // Later rows of a request see no less at the end and no more at the beginning.
        const u32 first = item.first_row / params.group_size;
        const u32 last = (item.first_row + item.num_rows - 1) / params.group_size;
        const KeyRange of_first = row_keys(params.attention, item, item.place.position + static_cast<i32>(first));
        const KeyRange of_last = row_keys(params.attention, item, item.place.position + static_cast<i32>(last));
        inner = {of_last.begin, of_first.end};
        keys.begin = of_first.begin;
        keys.end = of_last.end;
        keys.page_ids = params.attention.plan.page_ids + item.place.page_start;
        keys.first = keys.begin / TILE_TOKENS * TILE_TOKENS;
        keys.head = item.kv_head;
        const i32 all = keys.end <= keys.begin ? 0 : (keys.end - keys.first + TILE_TOKENS - 1) / TILE_TOKENS;
        tiles = max(0, all - static_cast<i32>(warp) + WARPS - 1) / WARPS;
    }
};

}  // namespace folio::decode
