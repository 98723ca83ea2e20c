// Which work a CTA of the Hopper prefill kernel does: tiles, the keys that they need, and the records by which the
// scheduler tells the other warps. Index arithmetic only.
//
// A tile is one work item for one block of query heads. The heads of a block share a KV head, and their rows
// are packed: row r of a warpgroup is position r / heads of its part of the item, for head r % heads of the block, so that
// a tile of few positions still fills the tensor cores and a group's heads read their keys once.
#pragma once

#include "core/cache.cuh"
#include "core/dependents.cuh"
#include "core/scales.cuh"
#include "params/prefill.h"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma_products.cuh"
#include "sm90/prefill/tile_context.cuh"
#include "sm90/prefill/tile_keys.cuh"
#include "sm90/prefill/tile_mask.cuh"

namespace folio::prefill {

// The type that products are taken in: that of 16-bit keys, fp16 for fp8, each of whose values it has.
template <class Key>
struct MathOf {
    using Type = Key;
};
template <>
struct MathOf<e4m3> {
    using Type = f16;
};
template <>
struct MathOf<e5m2> {
    using Type = f16;
};

using Query = FOLIO_Q;
using Element = MathOf<FOLIO_KV>::Type;
using Cache = CacheRows<Element>;  // rows of K and V in shared memory
using Stored = CacheRows<FOLIO_KV>;
static_assert(Stored::SCALES == ScaleGranularity::HEAD, "scales stay out of the loop over keys");
constexpr bool CONVERTS = FOLIO_KV::IS_FP8;  // to Element, on the way to shared memory
static_assert(!CONVERTS || !Query::IS_BF16, "kernels for fp16 take queries in bf16");
constexpr int DIM_QK = FOLIO_HEAD_DIM_QK, DIM_VO = FOLIO_HEAD_DIM_VO;  // a problem's may be smaller
// Split keys: the last columns of a key are in a tensor of their own, which all heads share. 0: keys are whole.
constexpr int ROPE_DIM = FOLIO_ROPE_DIM, DIM_NOPE = DIM_QK - ROPE_DIM;
constexpr int GROUP_ROWS = 64;  // query rows of a consumer warpgroup
constexpr int CONSUMERS = FOLIO_Q_TILE / GROUP_ROWS;
constexpr int BLOCK = FOLIO_KV_TILE;  // keys of a step
// CTAs of a multiprocessor. Those of one warpgroup are for tiles of one step or a few: they wait for memory, by turns.
// src/cuda/kernels/attention/sm90_prefill.rs says the same.
constexpr u32 CTAS = CONSUMERS > 1 ? 1 : DIM_QK > 64 || CONVERTS ? 2 : 3;
// How rows of K and V come. RAGGED: in boxes of consecutive rows, one for 64 columns. PAGED: in boxes of a page, one for
// all columns. ROWS: one by one. PAGED_COLUMNS: in boxes of a page, one for 64 columns, since rows end within them.
// PAGED_OWN: as PAGED, where warpgroups may have keys of their own.
enum class KvRows { RAGGED = 0, PAGED = 1, ROWS = 2, PAGED_COLUMNS = 3, PAGED_OWN = 4 };
constexpr KvRows KV_ROWS = static_cast<KvRows>(FOLIO_KV_ROWS);
constexpr bool OWN_KEYS = KV_ROWS == KvRows::PAGED_OWN;
constexpr bool COLUMNS_TOGETHER = KV_ROWS == KvRows::PAGED || OWN_KEYS;
constexpr bool PAGED = COLUMNS_TOGETHER || KV_ROWS == KvRows::PAGED_COLUMNS;
static_assert(!CONVERTS || KV_ROWS == KvRows::ROWS, "boxes go to a ring of their own before they are converted");
// Rows may go on from what they came to before, and see keys in other tensors first.
constexpr bool AFTER = FOLIO_AFTER;
static_assert(!AFTER || (ROPE_DIM > 0 && KV_ROWS == KvRows::RAGGED), "contexts of MLA");
constexpr bool MASKED = FOLIO_MASKED;  // what is seen does not follow from positions, or logits depend on distance
static_assert(!MASKED || !OWN_KEYS, "what rows of several requests see does not depend on positions");
// What logits are beside products times a factor. SOME: soft caps, by the way. CAPPED: all runs have one, of at most 64.
// BIASED: all runs have ALiBi.
enum class Logits { SOME = 0, CAPPED = 1, BIASED = 2 };
constexpr Logits LOGITS = static_cast<Logits>(FOLIO_LOGITS);
constexpr bool CAPPED = LOGITS == Logits::CAPPED, BIASED = LOGITS == Logits::BIASED;
static_assert(LOGITS == Logits::SOME || !(MASKED || OWN_KEYS || CONVERTS), "where they were measured");
constexpr int WARPGROUP = 128;
// Warps that read the records of tiles to load keys, those of them that fill a stage of K or of V, and how often it is
// said that a stage is full: by a box, by every thread's copies as they land, or by the warp that converted it.
constexpr u32 LOADING_WARPS = KV_ROWS == KvRows::ROWS ? 3 : 2, FILLING_WARPS = KV_ROWS == KvRows::ROWS ? 3 : 1;
constexpr bool BY_BOXES = KV_ROWS != KvRows::ROWS, BY_COPIES = !BY_BOXES && !CONVERTS;
constexpr u32 FULL_ARRIVALS = BY_COPIES ? FILLING_WARPS * 32 : 1;
constexpr int TILE_SLOTS = 4;  // tiles known to some warp of the CTA, see Scheduler
// Records of a tile, and barriers of a stage that say that it is full: of all warpgroups' keys, and of those of each.
constexpr int TILE_RECORDS = OWN_KEYS ? CONSUMERS : 1, FULL_BARRIERS = OWN_KEYS ? 1 + CONSUMERS : 1;

static_assert(DIM_QK % 16 == 0 && DIM_VO % 16 == 0 && BLOCK % 16 == 0);
static_assert(ROPE_DIM == 0 || (ROPE_DIM == 64 && DIM_NOPE % 64 == 0), "rope columns are a block of columns");
static_assert(!COLUMNS_TOGETHER || (DIM_QK % 64 == 0 && DIM_VO % 64 == 0), "rows are whole blocks of columns");
static_assert(FOLIO_Q_TILE % GROUP_ROWS == 0 && FOLIO_THREADS == WARPGROUP * (CONSUMERS + 1));

// Rows in shared memory lie in blocks of 64 columns, 128 bytes, which are swizzled in atoms of 8 rows. The last block of a
// row may be wider than what is left of it: columns beyond the tensor's read as zeros, and of those beyond DIM_QK and
// DIM_VO no product is made. Q is [column block][row]. So are K and V, unless a box has all columns of its tokens: then
// they are [8-token group][column block][row], so that one box fills any number of groups.
constexpr u32 BLOCK_COLUMNS = 64, BLOCK_ROW_BYTES = 128, ATOM_BYTES = 8 * BLOCK_ROW_BYTES;
constexpr __device__ __forceinline__ int column_blocks(int dim) { return (dim + 63) / 64; }
constexpr int KEY_COLUMN_BLOCKS = column_blocks(DIM_QK), VALUE_COLUMN_BLOCKS = column_blocks(DIM_VO);
constexpr u32 QUERY_COLUMN_STRIDE = GROUP_ROWS * BLOCK_ROW_BYTES;
constexpr u32 KEY_COLUMN_STRIDE = COLUMNS_TOGETHER ? ATOM_BYTES : BLOCK * BLOCK_ROW_BYTES;
constexpr u32 VALUE_COLUMN_STRIDE = KEY_COLUMN_STRIDE;
constexpr u32 KEY_GROUP_STRIDE = (COLUMNS_TOGETHER ? column_blocks(DIM_NOPE) : 1) * ATOM_BYTES;
constexpr u32 VALUE_GROUP_STRIDE = (COLUMNS_TOGETHER ? VALUE_COLUMN_BLOCKS : 1) * ATOM_BYTES;
// The rope columns of split keys are a tile of their own behind the other columns, [row][128 bytes].
constexpr u32 ROPE_KEYS = column_blocks(DIM_NOPE) * BLOCK * BLOCK_ROW_BYTES;

// Bytes of shared memory, in this order. Buffers are multiples of 1024 bytes: the swizzle needs that.
constexpr u32 QUERY_BYTES = KEY_COLUMN_BLOCKS * QUERY_COLUMN_STRIDE;
constexpr u32 COLUMN_BLOCK_BYTES = BLOCK * BLOCK_ROW_BYTES;
constexpr u32 KEY_BYTES = KEY_COLUMN_BLOCKS * COLUMN_BLOCK_BYTES;
constexpr u32 VALUE_BYTES = VALUE_COLUMN_BLOCKS * COLUMN_BLOCK_BYTES;
constexpr u32 STEP_BYTES = KEY_BYTES + VALUE_BYTES;
// What is converted: K or V of a step as it is in the cache, in whole blocks of columns.
constexpr int RAW_COLUMN_BLOCKS = KEY_COLUMN_BLOCKS > VALUE_COLUMN_BLOCKS ? KEY_COLUMN_BLOCKS : VALUE_COLUMN_BLOCKS;
constexpr u32 RAW_BYTES = CONVERTS ? BLOCK * Stored::row_bytes(BLOCK_COLUMNS * RAW_COLUMN_BLOCKS) : 0;
// What step_mask.cuh keeps of a tile, for every thread of the consumers: masks of rows, then slopes.
constexpr int ROW_MASKS_OF_THREAD = BLOCK <= 64 ? 1 : 2;
constexpr u32 ROW_MASK_BYTES = 16 * ROW_MASKS_OF_THREAD * WARPGROUP * CONSUMERS;
constexpr u32 MASK_BYTES = MASKED ? ROW_MASK_BYTES + 8 * WARPGROUP * CONSUMERS : 0;
// Two buffers for Q where that leaves room for two steps of K and V, and for what is not converted yet; then as much of
// the latter as there is room for, since that is what is under way from memory; then as many steps, up to four.
// src/cuda/kernels/attention/sm90_prefill.rs computes the same.
constexpr u32 RECORD_BYTES = OWN_KEYS ? 2048 : 1024;  // tile records and barriers
// A multiprocessor's shared memory, of which a CTA takes 1024 bytes more than it asks for.
constexpr u32 MOST_BUFFER_BYTES = 233472 / CTAS - 1024 - RECORD_BYTES - MASK_BYTES;
// Each warp converts one, and others are under way.
constexpr u32 WANTED_RAW_STAGES = 2 * FILLING_WARPS, MOST_RAW_STAGES = 4 * FILLING_WARPS;
constexpr u32 LEAST_STEPS_BYTES = 2 * STEP_BYTES + WANTED_RAW_STAGES * RAW_BYTES;
constexpr int QUERY_STAGES = !OWN_KEYS && 2 * CONSUMERS * QUERY_BYTES + LEAST_STEPS_BYTES <= MOST_BUFFER_BYTES ? 2 : 1;
constexpr u32 QUERIES_BYTES = QUERY_STAGES * CONSUMERS * QUERY_BYTES;
constexpr u32 RAW_ROOM = CONVERTS ? (MOST_BUFFER_BYTES - QUERIES_BYTES - 2 * STEP_BYTES) / RAW_BYTES : 0;
constexpr u32 RAW_STAGES = RAW_ROOM < MOST_RAW_STAGES ? RAW_ROOM : MOST_RAW_STAGES;
constexpr int ROOM = (MOST_BUFFER_BYTES - QUERIES_BYTES - RAW_STAGES * RAW_BYTES) / STEP_BYTES;
constexpr int STAGES = ROOM < 4 ? ROOM : 4;
static_assert(STAGES >= 2, "the next step is loaded while this one is multiplied");
constexpr u32 QUERIES = 0;
constexpr u32 KEYS = QUERIES + QUERIES_BYTES;
constexpr u32 VALUES = KEYS + STAGES * KEY_BYTES;
constexpr u32 RAW = VALUES + STAGES * VALUE_BYTES;
constexpr u32 TILES = RAW + RAW_STAGES * RAW_BYTES;
constexpr u32 TILE_BYTES = MASKED ? 72 : AFTER ? 64 : 56;
constexpr u32 BARRIERS = TILES + TILE_BYTES * TILE_SLOTS * TILE_RECORDS;
constexpr u32 TILE_FULL = BARRIERS;
constexpr u32 TILE_READ = TILE_FULL + 8 * TILE_SLOTS;
constexpr u32 QUERY_FULL = TILE_READ + 8 * TILE_SLOTS;
constexpr u32 QUERY_EMPTY = QUERY_FULL + 8 * QUERY_STAGES * CONSUMERS;
constexpr u32 KEY_FULL = QUERY_EMPTY + 8 * QUERY_STAGES * CONSUMERS;
constexpr u32 KEY_EMPTY = KEY_FULL + 8 * STAGES * FULL_BARRIERS;
constexpr u32 VALUE_FULL = KEY_EMPTY + 8 * STAGES;
constexpr u32 VALUE_EMPTY = VALUE_FULL + 8 * STAGES * FULL_BARRIERS;
constexpr u32 RAW_FULL = VALUE_EMPTY + 8 * STAGES, RAW_EMPTY = RAW_FULL + 8 * RAW_STAGES;
// All steps of a tile but the last ones have been asked for.
constexpr u32 TILE_ENDS = RAW_EMPTY + 8 * RAW_STAGES;
constexpr u32 ROW_MASKS = TILES + RECORD_BYTES, SLOPES = ROW_MASKS + ROW_MASK_BYTES;
static_assert(TILE_ENDS + 8 <= ROW_MASKS && ROW_MASKS + MASK_BYTES == FOLIO_SHARED_BYTES);

// Position in a ring of DEPTH buffers, and the parity of its barriers.
template <int DEPTH>
struct Ring {
    u32 index = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++index == DEPTH) {
            index = 0;
            parity ^= 1;
        }
    }
};

// The same among records of tiles: one register, of which warps that load rows have few.
struct SlotRing {
    static_assert((TILE_SLOTS & TILE_SLOTS - 1) == 0, "a power of two");
    u32 count = 0;

    __device__ __forceinline__ u32 index() const { return count % TILE_SLOTS; }
    __device__ __forceinline__ u32 parity() const { return count / TILE_SLOTS % 2; }
    __device__ __forceinline__ void advance() { ++count; }
};

// Of a launch, whose parameters begin with those of attention: from constant memory, where registers are few.
__device__ __forceinline__ const FolioPrefillParams &prefill_of(const FolioAttentionParams &params) {
    return reinterpret_cast<const FolioPrefillParams &>(params);
}

__device__ __forceinline__ const FolioPacking &packing_of(const FolioAttentionParams &params) {
    return prefill_of(params).packing;
}

// Tokens of a TMA box: the largest power of two that divides a page and a step. Rows one by one are boxes of one.
__device__ __forceinline__ u32 box_tokens(const FolioAttentionParams &params) {
    if constexpr (KV_ROWS == KvRows::RAGGED) return BLOCK;
    if constexpr (KV_ROWS == KvRows::ROWS) return 1;
    const u32 both = params.page_size | BLOCK;
    return both & -both;
}

// The position of a tile's row, counted from the tile's first; a row without one has that of the next warpgroup's first.
__device__ __forceinline__ u32 position_of(const FolioPacking &packing, u32 row) {
    return row / GROUP_ROWS * packing.positions + (row % GROUP_ROWS * packing.inverse >> 15);
}

// A launch's packing for one block of heads: the first ones, so many, are stored by the block before.
struct TilePacking {
    unsigned char heads, heads_before;
    unsigned short inverse;

    // Of a row of a warpgroup; of the row behind its last one, the positions that the rows have.
    __device__ __forceinline__ u32 position_within(u32 row) const { return row * inverse >> 15; }

    __device__ __forceinline__ u32 head_within(u32 row) const { return row - position_within(row) * heads; }
};

// A work item for one block of heads, as the warps of a CTA find it in shared memory. Its steps go from the
// last block of keys down.
struct Tile : TileMask<MASKED>, TileKeys<OWN_KEYS>, TileContext<AFTER, BLOCK> {
    int num_steps;  // 0: no more work
    int first_block;
    int kv_end;
    int position;    // of the first row; negative where there are more queries than keys
    u32 token;       // row of q and o
    u32 num_tokens;  // positions
    u32 head;        // first query head, of a block before where the packing has such
    u32 kv_head;
    u32 partial;
    TilePacking packing;
    i64 source;  // first entry of page_ids, or first row of ragged K/V

    // Positions of a warpgroup's rows.
    __device__ __forceinline__ u32 group_positions() const { return packing.position_within(GROUP_ROWS); }

    __device__ __forceinline__ u32 position_of(u32 row) const {
        return row / GROUP_ROWS * group_positions() + packing.position_within(row % GROUP_ROWS);
    }

    __device__ __forceinline__ u32 head_of(u32 row) const { return head + packing.head_within(row % GROUP_ROWS); }

    // The same for what is stored of a row: beyond all tokens where it has no position, or where another block stores its head.
    __device__ __forceinline__ u32 stored_position_of(u32 row) const {
        const u32 within = row % GROUP_ROWS;
        const bool is_stored =
            packing.position_within(within) < group_positions() && packing.head_within(within) >= packing.heads_before;
        return is_stored ? position_of(row) : ~0u;
    }

    // What products are multiplied by, in base e.
    __device__ __forceinline__ float product_scale(const FolioAttentionParams &params) const {
        return folio::product_scale(params, kv_head, request.index);
    }
};
static_assert(sizeof(Tile) == TILE_BYTES);

// A tile that sees no key still takes one step, of nothing but masked keys.
__device__ __forceinline__ Tile make_tile(const FolioPrefillParams &prefill, u32 item_index, u32 head_block) {
    const FolioAttentionParams &params = prefill.attention;
    const FolioWorkItem item = params.plan.items[item_index];
    Tile tile;
    tile.token = item.q_token;
    tile.num_tokens = existing_rows(params, tile.token, item.q_len);
    tile.position = item.position;
    tile.kv_end = item.kv_end;
    const int kv_start = item.kv_start;
    const KeyRange seen = tile.some(params, item);
    tile.first_block = (seen.end > seen.begin ? seen.end - 1 : kv_start) / BLOCK;
    tile.num_steps = seen.end > seen.begin ? tile.first_block - seen.begin / BLOCK + 1 : 1;
    tile.kv_head = head_block / prefill.group_blocks;
    const u32 group = prefill.group_size, heads = prefill.packing.heads;
    const u32 own = tile.kv_head * group + (head_block - tile.kv_head * prefill.group_blocks) * heads;
    tile.head = min(own, (tile.kv_head + 1) * group - heads);
    tile.partial = item.partial;
    tile.source = tile.place(prefill, item);
    tile.packing = {prefill.packing.heads, static_cast<unsigned char>(own - tile.head), prefill.packing.inverse};
    return tile;
}

}  // namespace folio::prefill
