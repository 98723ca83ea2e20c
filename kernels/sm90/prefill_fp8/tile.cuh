// Which work a CTA of the Hopper fp8 prefill kernel does, and where everything lies in its shared memory. Index
// arithmetic only.
//
// A tile is one work item for one block of query heads, as in sm90/prefill: row r is position r / pack of the item for
// head r % pack of the block, whose heads share a KV head.
#pragma once

#include "core/dependents.cuh"
#include "core/mask.cuh"
#include "params/prefill_fp8.h"
#include "ptx/tma.cuh"

namespace folio::prefill_fp8 {

constexpr int DIM = FOLIO_HEAD_DIM_QK;
constexpr int WARPGROUP = 128, GROUP_ROWS = 64;  // threads and query rows of a consumer warpgroup
constexpr int CONSUMERS = FOLIO_Q_TILE / GROUP_ROWS;
constexpr int PRODUCERS = FOLIO_THREADS / WARPGROUP - CONSUMERS;  // warpgroups that load and transpose, the first ones
constexpr int BLOCK = FOLIO_KV_TILE;                              // keys of a step
constexpr int STAGES = 2, QUERY_STAGES = 2;
constexpr bool GATHERED = FOLIO_GATHERED;  // rows of K and V are copied one by one
constexpr int TILE_SLOTS = 4;              // records of tiles that some warp of the CTA still reads
constexpr int TRANSPOSER_KEYS = 4096 / DIM, TRANSPOSERS = BLOCK / TRANSPOSER_KEYS;  // two to four warps
constexpr int PLACES = 4, MOST_BOXES = BLOCK / 8;  // blocks whose places are known, boxes of a block

// The launch bound gives 512 threads 128 registers each. At head_dim 64 consumers do with fewer, and where rows are copied one by
// one the others need more.
constexpr int PRODUCER_REGISTERS = PRODUCERS == 2 ? 40 : GATHERED && DIM == 64 ? 56 : 32;
constexpr int CONSUMER_REGISTERS = (512 - PRODUCERS * PRODUCER_REGISTERS) / CONSUMERS;
static_assert(CONSUMER_REGISTERS % 8 == 0);

static_assert(DIM == 64 || DIM == 128 || DIM == 256);
static_assert(FOLIO_HEAD_DIM_VO == DIM && FOLIO_Q_TILE % GROUP_ROWS == 0 && FOLIO_THREADS % WARPGROUP == 0);
static_assert(BLOCK % 32 == 0 && BLOCK % TRANSPOSER_KEYS == 0);

// Rows of up to 128 columns, swizzled over their whole width. Queries and keys are [row][dimension], those of 256
// dimensions in two parts. Values are [key][dimension] as loaded, likewise, and then transposed: [dimension][key] in rows
// of 128 bytes, followed by 8 rows of ones, whose product with P is the sum of P. Two stages share rows of values where
// both have room.
constexpr u32 COLUMNS = DIM < 128 ? DIM : 128, PARTS = DIM / COLUMNS;
constexpr u32 ROW = COLUMNS, VALUE_ROW = 128;
constexpr u32 QUERY_PART = GROUP_ROWS * ROW, KEY_PART = BLOCK * ROW;
constexpr u32 QUERY_BYTES = PARTS * QUERY_PART, KEY_BYTES = PARTS * KEY_PART;
constexpr u32 ONES_OFFSET = DIM * VALUE_ROW, ONES_BYTES = 8 * VALUE_ROW, VALUE_BYTES = ONES_OFFSET + ONES_BYTES;
constexpr bool STAGES_SHARE_ROWS = STAGES * BLOCK <= VALUE_ROW;
constexpr u32 VALUE_BUFFERS = STAGES_SHARE_ROWS ? 1 : STAGES, VALUE_STAGE = STAGES_SHARE_ROWS ? BLOCK : VALUE_BYTES;
// Sums of finished stretches of keys: fp32, or means in fp16 where there is no room.
constexpr bool KEEPS_MEANS = DIM > 128;
constexpr u32 WARP_SUM_BYTES = GROUP_ROWS / 4 * DIM * (KEEPS_MEANS ? 2 : 4);

// The piece of 16 bytes of a row in which the swizzle puts piece 0.
__device__ __forceinline__ u32 first_piece(u32 row) { return ROW == 128 ? row % 8 : row / 2 % 4; }

// Offsets in shared memory. Buffers are multiples of 1024 bytes: the swizzle needs that.
constexpr u32 QUERIES = 0;
constexpr u32 KEYS = QUERIES + QUERY_STAGES * CONSUMERS * QUERY_BYTES;
constexpr u32 RAW_VALUES = KEYS + STAGES * KEY_BYTES;
constexpr u32 VALUES = RAW_VALUES + STAGES * KEY_BYTES;
constexpr u32 SUMS = VALUES + VALUE_BUFFERS * VALUE_BYTES;
constexpr u32 TILES = SUMS + 4 * CONSUMERS * WARP_SUM_BYTES;
constexpr u32 TILE_FULL = TILES + 56 * TILE_SLOTS;
constexpr u32 TILE_READ = TILE_FULL + 8 * TILE_SLOTS;
constexpr u32 QUERY_FULL = TILE_READ + 8 * TILE_SLOTS;
constexpr u32 QUERY_EMPTY = QUERY_FULL + 8 * QUERY_STAGES;
constexpr u32 KEY_FULL = QUERY_EMPTY + 8 * QUERY_STAGES;
constexpr u32 KEY_EMPTY = KEY_FULL + 8 * STAGES;
constexpr u32 RAW_FULL = KEY_EMPTY + 8 * STAGES;  // of each transposing warp
constexpr u32 VALUE_FULL = RAW_FULL + 8 * STAGES * TRANSPOSERS;
constexpr u32 VALUE_EMPTY = VALUE_FULL + 8 * STAGES;
constexpr u32 PLACE_FULL = VALUE_EMPTY + 8 * STAGES;
constexpr u32 PLACE_READ = PLACE_FULL + 8 * PLACES;
constexpr u32 PLACE_RECORDS = PLACE_READ + 8 * PLACES;
constexpr u32 ROW_PLACES = PLACE_RECORDS;  // of K's rows, which have no boxes
static_assert(PLACE_RECORDS + 4 * (GATHERED ? BLOCK : (MOST_BOXES + 1) * PLACES) <= FOLIO_SHARED_BYTES &&
              TILES + 1024 == FOLIO_SHARED_BYTES);

// Position in a ring of DEPTH buffers, and the parity of its barriers: one register.
template <u32 DEPTH>
struct Ring {
    static_assert((DEPTH & DEPTH - 1) == 0, "a power of two");
    u32 count = 0;

    __device__ __forceinline__ u32 index() const { return count % DEPTH; }
    __device__ __forceinline__ u32 parity() const { return count / DEPTH % 2; }
    __device__ __forceinline__ void advance() { ++count; }
};

// Query heads that are packed into a tile: the largest power of two that divides a group, up to 16.
__device__ __forceinline__ u32 packed_heads(const FolioAttentionParams &params) {
    const u32 group = params.num_qo_heads / params.num_kv_heads | 16;
    return group & -group;
}

// Tokens of a TMA box: the largest power of two that divides a page and what a transposing warp loads.
__device__ __forceinline__ u32 box_tokens(const FolioAttentionParams &params) {
    const u32 both = params.page_size | TRANSPOSER_KEYS;
    return both & -both;
}

// What the warps of a CTA know of a tile. Its steps go from the last block of keys down.
struct Tile {
    int num_steps;  // 0: no more work
    int first_block;
    int kv_end;
    int position;    // of the first row; negative where there are more queries than keys
    u32 token;       // row of q and o
    u32 num_tokens;  // positions
    u32 head;        // first query head
    u32 kv_head;
    u32 request;
    u32 partial;
    int pack_shift;  // row r is position r >> pack_shift
    i64 source;      // first entry of page_ids
};
static_assert(sizeof(Tile) == 56);

__device__ __forceinline__ Tile *shared_tiles() {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    return reinterpret_cast<Tile *>(shared_bytes + TILES);
}

// Where the boxes of a block are, counted as the maps count.
struct Place {
    int group[MOST_BOXES];
    u32 head;
};
static_assert(sizeof(Place) == 4 * (MOST_BOXES + 1));

__device__ __forceinline__ Place *shared_places() {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    return reinterpret_cast<Place *>(shared_bytes + PLACE_RECORDS);
}

// A tile that sees no key still takes one step, of nothing but masked keys.
__device__ __forceinline__ Tile make_tile(const FolioAttentionParams &params, u32 item_index, u32 head_block) {
    // For every tile anew where registers are short.
    FolioAttentionParams bounds = params;
    if (GATHERED) bounds.window_left = kept(bounds.window_left), bounds.window_right = kept(bounds.window_right);
    const Window<i32> window(bounds);
    const FolioWorkItem item = params.plan.items[item_index];
    Tile tile;
    tile.token = item.q_token;
    tile.num_tokens = existing_rows(params, tile.token, item.q_len);
    tile.position = item.position;
    tile.kv_end = item.kv_end;
    const int kv_start = item.kv_start;
    const int end = min(tile.kv_end, window.end(tile.position + static_cast<int>(item.q_len) - 1));
    const int start = max(kv_start, window.begin(tile.position));
    tile.first_block = (end > start ? end - 1 : kv_start) / BLOCK;
    tile.num_steps = end > start ? tile.first_block - start / BLOCK + 1 : 1;
    tile.head = head_block * packed_heads(params);
    tile.kv_head = tile.head / (params.num_qo_heads / params.num_kv_heads);
    tile.request = item.request;
    tile.partial = item.partial;
    tile.source = item.page_start;
    tile.pack_shift = __ffs(packed_heads(params)) - 1;
    return tile;
}

}  // namespace folio::prefill_fp8
