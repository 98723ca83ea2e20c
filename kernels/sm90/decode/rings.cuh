// The rings of the decode kernel's warps: how many there are and how deep, and which tiles of an item each has.
#pragma once

#include "sm90/decode/load.cuh"
#include "sm90/decode/span.cuh"

namespace folio::decode {

constexpr int WARPS = THREADS / 32, ROW_GROUPS = ROWS / WARP_ROWS;
static_assert(ROWS % WARP_ROWS == 0 && WARPS % ROW_GROUPS == 0);
// Queries that registers have no room for beside the outputs live in shared memory.
constexpr bool SHARED_QUERIES = HEAD_DIM_QK > 192 || WARP_ROWS > 16;
constexpr int QUERY_BYTES = SHARED_QUERIES ? QUERY_PARTS * HEADS * ROWS * HEAD_DIM_QK * 2 : 0;
// Scales of a token and head: of the key, of the value.
constexpr int KEY_SCALE_BYTES = TOKEN_SCALES ? 4 : BLOCK_SCALES ? HEAD_DIM_QK / SCALE_BLOCK : 0;
constexpr int VALUE_SCALE_BYTES = TOKEN_SCALES ? 4 : BLOCK_SCALES ? HEAD_DIM_VO / SCALE_BLOCK : 0;
constexpr int BYTES_BESIDE = KEY_SCALE_BYTES + VALUE_SCALE_BYTES;
// 96 KiB of rings in flight hide the latency of DRAM. 128 bytes are for barriers where the rings do not end before.
constexpr int SUMS_BYTES = WARPS * HEADS * WARP_ROWS * 8;
constexpr int MOST_RING_BYTES = 96 * 1024, FREE_BYTES = BLOCK_BYTES - 128 - SUMS_BYTES - QUERY_BYTES;
using Shape = RingShape<HEADS, FOLIO_KV_TILE, HEAD_DIM_QK, HEAD_DIM_VO, RowsOf<CacheType>::Type, BYTES_BESIDE,
                        WARPS / ROW_GROUPS, ROW_GROUPS, MOST_RING_BYTES, FREE_BYTES>;
using KTile = Shape::KTile;
using VTile = Shape::VTile;
constexpr int TILE_TOKENS = Shape::TILE_TOKENS, KEY_GROUPS = Shape::KEY_GROUPS;

// The keys that any row of the CTA sees, and those that all rows see.
struct TileSpan {
    KeySpan keys;
    KeyRange inner;
    i32 tiles;  // of this key group

    __device__ __forceinline__ TileSpan(const FolioPaddedDecodeParams &params, const Item &item, u32 key_group) {
        const RowsSpan seen(params, item);
        inner = seen.all;
        keys.begin = seen.some.begin;
        keys.end = seen.some.end;
        keys.page_ids = params.attention.plan.page_ids + item.work.page_start;
        keys.first = keys.begin / TILE_TOKENS * TILE_TOKENS;
        keys.head = item.kv_head;
        const i32 all = keys.end <= keys.begin ? 0 : (keys.end - keys.first + TILE_TOKENS - 1) / TILE_TOKENS;
        tiles = max(0, all - static_cast<i32>(key_group) + KEY_GROUPS - 1) / KEY_GROUPS;
    }
};

}  // namespace folio::decode
