// Which work a CTA of the Hopper prefill kernel does: tiles, the keys they need, and what the consumers are
// told about them. Index arithmetic only.
//
// A tile is one work item for one block of query heads. The heads of a block share a KV head, and their rows
// are packed: row r of a tile is position r / pack of the item for head r % pack of the block, so that a tile
// of few positions still fills the matrix unit and a group's heads read their keys once.
#pragma once

#include "common/tma.cuh"
#include "params.h"
#include "sm90/wgmma.cuh"

namespace folio::prefill {

using Element = FOLIO_ELEMENT;
constexpr int kDimQk = FOLIO_HEAD_DIM_QK, kDimVo = FOLIO_HEAD_DIM_VO;
constexpr int kConsumers = FOLIO_CONSUMERS;  // warpgroups of 64 rows each
constexpr int kBlock = FOLIO_KV_TILE;        // keys of a step
constexpr int kStages = FOLIO_STAGES;        // steps of K and of V in shared memory
constexpr int kQueryStages = FOLIO_Q_STAGES;
constexpr bool kPaged = FOLIO_PAGED;
constexpr int kGroupRows = 64;
constexpr int kWarpgroup = 128;
constexpr int kUnlimited = 1 << 30;

static_assert(kDimQk % 64 == 0 && kDimVo % 64 == 0 && kBlock % 16 == 0);

// Bytes of shared memory, in this order. Tiles are multiples of 1024 bytes: the swizzle needs that.
constexpr unsigned kQueryBytes = kGroupRows * kDimQk * 2;
constexpr unsigned kKeyBytes = kBlock * kDimQk * 2, kValueBytes = kBlock * kDimVo * 2;
constexpr unsigned kQueries = 0;
constexpr unsigned kKeys = kQueries + kQueryStages * kConsumers * kQueryBytes;
constexpr unsigned kValues = kKeys + kStages * kKeyBytes;
constexpr unsigned kBarriers = kValues + kStages * kValueBytes;
constexpr unsigned kQueryFull = kBarriers;
constexpr unsigned kQueryEmpty = kQueryFull + 8 * kQueryStages * kConsumers;
constexpr unsigned kKeyFull = kQueryEmpty + 8 * kQueryStages * kConsumers;
constexpr unsigned kKeyEmpty = kKeyFull + 8 * kStages;
constexpr unsigned kValueFull = kKeyEmpty + 8 * kStages;
constexpr unsigned kValueEmpty = kValueFull + 8 * kStages;
constexpr unsigned kOrders = kValueEmpty + 8 * kStages;

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

// A work item for one block of heads.
struct Tile {
    unsigned token;       // row of q and o
    unsigned num_tokens;  // positions
    int position;         // of the first; negative where there are more queries than keys
    int kv_start, kv_end;
    unsigned head;        // first query head
    unsigned partial;
    folio_i64 source;     // first entry of page_ids, or first row of ragged K/V
};

// The steps of a tile, from the last block of keys down.
struct Steps {
    int first, count;

    // A tile that sees no key still takes one step, of nothing but masked keys.
    __device__ __forceinline__ Steps(const Tile &tile, const Span &span) {
        const int last_position = tile.position + static_cast<int>(tile.num_tokens) - 1;
        const int end = min(tile.kv_end, last_position + span.right + 1);
        const int start = max(tile.kv_start, tile.position - span.left);
        first = end > start ? (end - 1) / kBlock : tile.kv_start / kBlock;
        count = end > start ? first - start / kBlock + 1 : 1;
    }
};

constexpr float kLog2E = 1.4426950408889634f;

// From products q k to logits in units of log2. The scale goes into the exponent, exp2(s * scale - max *
// scale), except where it cannot: under a soft cap, and for scales that are not positive, under which the
// largest product is not the largest logit. Then exponent is 1 and the products are transformed first:
// to product * s, or to cap * tanh(product * s / 2 log2(e)).
struct LogitsScale {
    float exponent, product, cap;

    __device__ __forceinline__ LogitsScale(const FolioAttentionParams &params, unsigned kv_head) {
        float scale = params.logits_scale;
        if (params.k_scales != nullptr) scale *= params.k_scales[kv_head * params.k_scales_stride];
        const bool capped = params.logits_soft_cap > 0.0f;
        const bool direct = !capped && scale > 0.0f;
        exponent = direct ? scale * kLog2E : 1.0f;
        cap = capped ? params.logits_soft_cap * kLog2E : 0.0f;
        product = direct ? 1.0f : capped ? 2 * kLog2E * __fdividef(scale, params.logits_soft_cap) : scale * kLog2E;
    }
};

// What the consumers of one warpgroup are told about a tile, in shared memory.
struct Order {
    int num_steps;  // 0: no more work
    int first_block;
    int mask_from, mask_below;  // blocks with keys that some row of the warpgroup must not see
    int position, kv_end;
    unsigned token, num_tokens, head, kv_head, partial;
    int stale_begin, stale_end;  // rows of the first block's V that hold no value
    float exponent_scale, product_scale, soft_cap;  // see LogitsScale
};
constexpr int kNumOrders = 4;  // a slot is written again when its tile is long done, see prefill_load.cuh
constexpr unsigned kSharedBytes = kOrders + kConsumers * kNumOrders * sizeof(Order);

__device__ __forceinline__ Order make_order(const FolioAttentionParams &params, const Tile &tile,
                                            const Steps &steps, const Span &span, unsigned consumer) {
    const unsigned pack = packed_heads(params);
    const int skipped = consumer * (kGroupRows / pack);
    const int first = tile.position + skipped;
    const int last = tile.position + min((consumer + 1) * (kGroupRows / pack), tile.num_tokens) - 1;
    const int first_key = steps.first * kBlock;
    const int box = box_tokens(params);
    const unsigned kv_head = tile.head / (params.num_qo_heads / params.num_kv_heads);
    const LogitsScale scale(params, kv_head);
    Order order = {};
    order.num_steps = steps.count;
    order.first_block = steps.first;
    order.mask_from = max(min(tile.kv_end, first + span.right + 1), 0) / kBlock;
    order.mask_below = (max(last - span.left, 0) + kBlock - 1) / kBlock;
    order.position = tile.position;
    order.kv_end = tile.kv_end;
    order.token = tile.token;
    order.num_tokens = tile.num_tokens;
    order.head = tile.head;
    order.kv_head = kv_head;
    order.partial = tile.partial;
    order.stale_begin = tile.kv_end - first_key;
    order.stale_end = kPaged ? min(kBlock, (tile.kv_end + box - 1) / box * box - first_key) : kBlock;
    order.exponent_scale = scale.exponent;
    order.product_scale = scale.product;
    order.soft_cap = scale.cap;
    return order;
}

// A warp's walk over the tiles of its CTA. Rounds run through the CTAs in alternating directions, so that
// items sorted by size even out. The two dependent loads of a tile (its item, then its request) are made one
// tile and two tiles ahead; lane i holds word i of each.
class TileWalk {
public:
    __device__ __forceinline__ TileWalk(const FolioAttentionParams &params, unsigned lane)
        : params(params), lane(lane), head_blocks(params.num_qo_heads / packed_heads(params)),
          num_tiles(params.plan.counts[0] * head_blocks) {
        item = load_item(0);
        next_item = load_item(1);
        request = load_request(item);
    }

    __device__ __forceinline__ bool done() const { return index(round) >= num_tiles; }

    // The tile at hand; starts the loads of those that follow.
    __device__ __forceinline__ Tile take() {
        const unsigned q_start = word(item, 1);
        const unsigned first_token = word(request, 1);
        const int kv_len = word(request, 0);
        const int q_len = word(request, 2) - first_token;
        Tile tile;
        tile.token = first_token + q_start;
        tile.num_tokens = word(item, 2);
        tile.position = kv_len - q_len + static_cast<int>(q_start);
        tile.kv_start = word(item, 3);
        tile.kv_end = min(static_cast<int>(word(item, 4)), kv_len);
        tile.partial = word(item, 5);
        tile.head = index(round) % head_blocks * packed_heads(params);
        tile.source = static_cast<folio_i64>(word(request, 4)) << 32 | word(request, 3);
        ++round;
        item = next_item;
        next_item = load_item(round + 1);
        request = load_request(item);
        return tile;
    }

private:
    static __device__ __forceinline__ unsigned word(unsigned words, int i) {
        return __shfl_sync(0xffffffffu, words, i);
    }

    __device__ __forceinline__ unsigned index(unsigned of_round) const {
        return of_round * gridDim.x + (of_round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }

    __device__ __forceinline__ unsigned load_item(unsigned of_round) const {
        const unsigned tile = index(of_round);
        if (tile >= num_tiles || lane >= 8) return 0;
        return reinterpret_cast<const unsigned *>(params.plan.items + tile / head_blocks)[lane];
    }

    __device__ __forceinline__ unsigned load_request(unsigned of_item) const {
        const unsigned b = word(of_item, 0);
        if (done()) return 0;
        if (lane == 0) return params.plan.kv_len[b];
        if (lane < 3) return params.plan.qo_indptr[b + lane - 1];
        if (lane < 5) return reinterpret_cast<const unsigned *>(params.plan.page_start + b)[lane - 3];
        return 0;
    }

    const FolioAttentionParams &params;
    unsigned lane, head_blocks, num_tiles, round = 0;
    unsigned item, next_item, request;
};

}  // namespace folio::prefill
