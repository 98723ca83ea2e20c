// One instantiation of the decode kernel (types, shapes), and what a CTA and its lanes know of their work item:
// rows, visible keys, logits. Nothing here touches keys or values.
#pragma once

#include "core/mask.cuh"
#include "core/softmax.cuh"
#include "params/decode.h"
#include "sm90/decode/form.cuh"
#include "sm90/decode/tile.cuh"

namespace folio::decode {

using CacheType = FOLIO_KV;
using Op = Operands<CacheType>;
using Math = Op::Math;

// Of the kernel's rows; the problem's may be less.
constexpr int HEAD_DIM_QK = FOLIO_HEAD_DIM_QK, HEAD_DIM_VO = FOLIO_HEAD_DIM_VO;
constexpr int THREADS = FOLIO_THREADS, HEADS = FOLIO_DECODE_HEADS;
// Packed rows per KV head: of the CTA, and of a warp, which has registers for 32 outputs of 128 columns or 16 of 256. Warps
// of a warpgroup that multiplies together (sm90/decode_warpgroup) have all rows, and a part of the keys or of the columns.
constexpr bool BY_WARPGROUP = FOLIO_DECODE_WARPGROUP;
constexpr int ROWS = FOLIO_Q_TILE, REGISTER_ROWS = HEAD_DIM_QK <= 128 && HEAD_DIM_VO <= 128 ? 32 : 16;
constexpr int WARP_ROWS = BY_WARPGROUP || ROWS < REGISTER_ROWS ? ROWS : REGISTER_ROWS;
// A warp's packed rows per KV head, in eights, and the columns of its products altogether: one KV head with up to 32
// rows, or two with up to 8 each.
constexpr int ROW_TILES = WARP_ROWS / 8;
constexpr int COLUMN_TILES = HEADS * ROW_TILES;
constexpr int QUERY_STEPS = HEAD_DIM_QK / 16;
// Two CTAs are to have room on a multiprocessor.
constexpr int BLOCK_BYTES = 113 * 1024;

struct Item {
    FolioWorkItem work;
    // Rows first_row .. first_row + num_rows of the item's q_len x group, for each of the CTA's KV heads.
    u32 kv_head, first_row, num_rows;

    // Whether its rows are to be combined with those of other chunks.
    __device__ __forceinline__ bool is_part() const { return work.partial != FOLIO_NO_PARTIAL; }

    // Rows that a row group has, of which there may be none.
    __device__ __forceinline__ u32 rows_of(u32 row_group) const {
        const u32 before = row_group * WARP_ROWS;
        return num_rows <= before ? 0 : min(num_rows - before, static_cast<u32>(WARP_ROWS));
    }

    // The item for the rows of one row group; for the last row where it has none.
    __device__ __forceinline__ Item part(u32 row_group) const {
        Item of_group = *this;
        of_group.first_row += min(row_group * WARP_ROWS, num_rows - 1);
        of_group.num_rows = max(rows_of(row_group), 1u);
        return of_group;
    }
};

__device__ __forceinline__ Item read_item(const FolioPaddedDecodeParams &params, u32 index) {
    Item item;
    const FolioPlanView &plan = params.attention.plan;
    const uint4 *words = reinterpret_cast<const uint4 *>(plan.items + index);
    const uint4 a = words[0], b = words[1], c = words[2];
    item.work = {a.x,
                 a.y,
                 a.z,
                 a.w,
                 b.x,
                 b.y,
                 b.z,
                 b.w,
                 static_cast<i64>(static_cast<u64>(c.y) << 32 | c.x),
                 static_cast<i32>(c.z),
                 static_cast<i32>(c.w)};
    item.kv_head = blockIdx.x * HEADS;
    item.first_row = blockIdx.y * ROWS;
    const u32 rows = existing_rows(params.attention, item.work.q_token, item.work.q_len) * params.group_size;
    item.num_rows = rows <= item.first_row ? 0 : min(rows - item.first_row, static_cast<u32>(ROWS));
    return item;
}

// All keys of the item.
__device__ __forceinline__ KeyRange item_keys(const Item &item) {
    return {static_cast<i32>(item.work.kv_start), static_cast<i32>(item.work.kv_end)};
}

// One packed row: its query row within the item, and its query head within the group.
struct PackedRow {
    u32 query, head;
};

// Row `row` of an item; rows past the last repeat the last, and their results are dropped.
__device__ __forceinline__ PackedRow packed_row(const FolioPaddedDecodeParams &params, const Item &item, u32 row) {
    const u32 packed = item.first_row + min(row, item.num_rows - 1);
    const u32 query = packed / params.group_size;
    return {query, packed - query * params.group_size};
}

// The rows whose scores a lane holds: 8t + 2i and 8t + 2i + 1 for i = lane % 4, the same of every KV head.
struct LaneRows {
    i32 position[ROW_TILES][2];

    __device__ __forceinline__ LaneRows(const FolioPaddedDecodeParams &params, const Item &item, u32 lane) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const PackedRow row = packed_row(params, item, 8 * t + 2 * (lane & 3) + j);
                position[t][j] = item.work.position + static_cast<i32>(row.query);
            }
        }
    }
};

// Calls `use` with the rule, whose parts that are off are known to be: a test for every logit would keep the logits of a lane,
// which depend on nothing of each other, from being computed at the same time.
template <class Use>
__device__ __forceinline__ void with_rule(const LogitRule &rule, Use use) {
    LogitRule known = rule;
    if (rule.plain()) {
        known.cap = 0.0f, known.alibi = false;
        use(known);
    } else if (!rule.alibi) {
        __builtin_assume(known.cap > 0.0f);
        known.alibi = false;
        use(known);
    } else {
        known.alibi = true;
        use(known);
    }
}

// The scales and slopes of a lane's scores.
struct LaneLogits {
    LogitRule rule;
    float scale[COLUMN_TILES][2], slope[COLUMN_TILES][2];
    float bias[COLUMN_TILES][2];  // of products, by zero points of keys; for such forms only

    __device__ __forceinline__ LaneLogits(const FolioPaddedDecodeParams &params, const Item &item, u32 lane)
        : rule(params.attention) {
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            const u32 kv_head = item.kv_head + c / ROW_TILES;
            const float factor = rule.scale<CapDivision::BY_RECIPROCAL>(params.attention, kv_head, item.work.request);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const PackedRow row = packed_row(params, item, 8 * (c % ROW_TILES) + 2 * (lane & 3) + j);
                scale[c][j] = factor;
                slope[c][j] = rule.slope(params.attention, item.work.request, kv_head * params.group_size + row.head);
            }
        }
    }
};

// Below every finite score in base 2, and finite, so that a difference of two maxima is never NaN.
constexpr float NO_MAX = -1e30f;
// A row maximum is kept until a score exceeds it by this much: probabilities stay below 2^8.
constexpr float RESCALE_THRESHOLD = 8.0f;

}  // namespace folio::decode
