// Which work a CTA of the Hopper prefill kernel does: tiles, the keys they need, and what the consumers are
// told about them. Index arithmetic only.
//
// A tile is one work item for one block of query heads. The heads of a block share a KV head, and their rows
// are packed: row r of a tile is position r / pack of the item for head r % pack of the block, so that a tile
// of few positions still fills the matrix unit and a group's heads read their keys once.
#pragma once

#include "common/dtype.cuh"
#include "common/tma.cuh"
#include "sm90/wgmma.cuh"

namespace folio::prefill {

using Element = FOLIO_Q;
constexpr int kDimQk = FOLIO_HEAD_DIM_QK, kDimVo = FOLIO_HEAD_DIM_VO;
constexpr int kGroupRows = 64;                             // query rows of a consumer warpgroup
constexpr int kConsumers = FOLIO_Q_TILE / kGroupRows;
constexpr int kBlock = FOLIO_KV_TILE;                      // keys of a step
constexpr int kStages = kDimQk == 64 ? 4 : kConsumers == 3 ? 3 : 2;  // steps of K and of V in shared memory
constexpr bool kPaged = FOLIO_PAGED;
constexpr int kWarpgroup = 128;
constexpr int kTileSlots = 4;                              // tiles known to some warp of the CTA, see Scheduler
constexpr int kUnlimited = 1 << 30;

static_assert(kDimQk % 64 == 0 && kDimVo % 64 == 0 && kBlock % 16 == 0);
static_assert(FOLIO_Q_TILE % kGroupRows == 0 && FOLIO_THREADS == kWarpgroup * (kConsumers + 1));

// Bytes of shared memory, in this order. Buffers are multiples of 1024 bytes: the swizzle needs that.
constexpr unsigned kQueryBytes = kGroupRows * kDimQk * 2;
constexpr unsigned kKeyBytes = kBlock * kDimQk * 2, kValueBytes = kBlock * kDimVo * 2;
constexpr unsigned kMostShared = 232448 - 1024;
constexpr int kQueryStages = 2 * kConsumers * kQueryBytes + kStages * (kKeyBytes + kValueBytes) <= kMostShared ? 2 : 1;
constexpr unsigned kQueries = 0;
constexpr unsigned kKeys = kQueries + kQueryStages * kConsumers * kQueryBytes;
constexpr unsigned kValues = kKeys + kStages * kKeyBytes;
constexpr unsigned kTiles = kValues + kStages * kValueBytes;
constexpr unsigned kBarriers = kTiles + 48 * kTileSlots;
constexpr unsigned kTileFull = kBarriers;
constexpr unsigned kTileRead = kTileFull + 8 * kTileSlots;
constexpr unsigned kQueryFull = kTileRead + 8 * kTileSlots;
constexpr unsigned kQueryEmpty = kQueryFull + 8 * kQueryStages * kConsumers;
constexpr unsigned kKeyFull = kQueryEmpty + 8 * kQueryStages * kConsumers;
constexpr unsigned kKeyEmpty = kKeyFull + 8 * kStages;
constexpr unsigned kValueFull = kKeyEmpty + 8 * kStages;
constexpr unsigned kValueEmpty = kValueFull + 8 * kStages;
static_assert(kValueEmpty + 8 * kStages <= FOLIO_SHARED_BYTES && kTiles + 1024 == FOLIO_SHARED_BYTES);

// K and V tiles in shared memory: paged ones as [8-token group][64-column block][8 rows][128 bytes], so that
// one box fills any number of groups; ragged ones as [64-column block][row][128 bytes], a box per block.
constexpr unsigned kKeyGroupStride = kPaged ? kDimQk / 64 * 1024 : 1024;
constexpr unsigned kKeyColumnStride = kPaged ? 1024 : kBlock * 128;
constexpr unsigned kValueGroupStride = kPaged ? kDimVo / 64 * 1024 : 1024;
constexpr unsigned kValueColumnStride = kPaged ? 1024 : kBlock * 128;

// Position in a ring of kDepth buffers, and the parity of its barriers.
template <int kDepth>
struct Ring {
    unsigned index = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++index == kDepth) {
            index = 0;
            parity ^= 1;
        }
    }
};

// Query heads that are packed into a tile: the largest power of two that divides a group, up to 16. More
// would only make the list of items longer.
__device__ __forceinline__ unsigned packed_heads(const FolioAttentionParams &params) {
    const unsigned group = params.num_qo_heads / params.num_kv_heads | 16;
    return group & -group;
}

// Tokens of a TMA box: the largest power of two that divides a page and a step.
__device__ __forceinline__ unsigned box_tokens(const FolioAttentionParams &params) {
    if constexpr (!kPaged) return kBlock;
    const unsigned both = params.page_size | kBlock;
    return both & -both;
}

// How many keys before and after its own position a row sees.
struct Span {
    int left, right;

    __device__ __forceinline__ explicit Span(const FolioAttentionParams &params) {
        left = params.window_left < 0 ? kUnlimited : min(params.window_left, kUnlimited);
        right = params.window_right < 0 ? kUnlimited : min(params.window_right, kUnlimited);
        if (params.mask_mode == FOLIO_MASK_CAUSAL) right = min(right, 0);
    }
};

// A work item for one block of heads, as the warps of a CTA find it in shared memory. Its steps go from the
// last block of keys down.
struct Tile {
    int num_steps;        // 0: no more work
    int first_block;
    int kv_end;
    int position;         // of the first row; negative where there are more queries than keys
    unsigned token;       // row of q and o
    unsigned num_tokens;  // positions
    unsigned head;        // first query head
    unsigned kv_head;
    unsigned partial;
    int pack_shift;       // row r is position r >> pack_shift
    folio_i64 source;     // first entry of page_ids, or first row of ragged K/V
};
static_assert(sizeof(Tile) == 48);

// A tile that sees no key still takes one step, of nothing but masked keys.
__device__ __forceinline__ Tile make_tile(const FolioAttentionParams &params, unsigned item_index,
                                          unsigned head_block) {
    const Span span(params);
    const FolioWorkItem item = params.plan.items[item_index];
    const FolioItemPlace place = params.plan.places[item_index];
    Tile tile;
    tile.token = place.q_token;
    tile.num_tokens = item.q_len;
    tile.position = place.position;
    tile.kv_end = item.kv_end;
    const int kv_start = item.kv_start;
    const int end = min(tile.kv_end, tile.position + static_cast<int>(item.q_len) + span.right);
    const int start = max(kv_start, tile.position - span.left);
    tile.first_block = (end > start ? end - 1 : kv_start) / kBlock;
    tile.num_steps = end > start ? tile.first_block - start / kBlock + 1 : 1;
    tile.head = head_block * packed_heads(params);
    tile.kv_head = tile.head / (params.num_qo_heads / params.num_kv_heads);
    tile.partial = item.partial;
    tile.source = place.page_start;
    tile.pack_shift = __ffs(packed_heads(params)) - 1;
    return tile;
}

}  // namespace folio::prefill
