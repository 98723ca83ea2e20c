// How a warp of the decode kernel fills its own ring of K/V stages: by TMA boxes, or by gathering rows with
// cp.async where pages are too small or oddly strided for a box. Both leave zeros for keys that lie in pages no
// row sees.
//
// A stage is K then V, each [box][KV head][tokens of a box / 8][8 rows]. Neighbouring heads are loaded together
// because their rows are neighbours in memory: at 128 bytes a row, DRAM gives 5 % more for two heads at a time.
#pragma once

#include "common/tma.cuh"
#include "params.h"
#include "sm90/decode_tile.cuh"

namespace folio {

// Heads and tokens per tile, row bytes and ring depth of one instantiation.
template <int kHeads_, int kTileTokens_, int kKRowBytes_, int kVRowBytes_, int kStages_, int kWarps_>
struct RingShape {
    static constexpr int kHeads = kHeads_, kTileTokens = kTileTokens_;
    static constexpr int kKRowBytes = kKRowBytes_, kVRowBytes = kVRowBytes_;
    static constexpr int kStages = kStages_, kWarps = kWarps_;
    static constexpr int kKBytes = kHeads * kTileTokens * kKRowBytes, kVBytes = kHeads * kTileTokens * kVRowBytes;
    static constexpr int kStageBytes = kKBytes + kVBytes;
    static constexpr int kWarpBytes = kStages * kStageBytes;
    static constexpr int kRingBytes = kWarps * kWarpBytes;
    // A lane holds the place of one token in GatherLoader; strides between groups are worked out for 16 tokens.
    static_assert(kTileTokens % 16 == 0 && kTileTokens <= 32 && (kHeads == 1 || kTileTokens == 16));
};

// Byte distances inside a stage, for rows of kRowBytes.
template <class Shape, int kRowBytes>
struct StageStrides {
    unsigned group, head;  // from 8 tokens to the next 8 of the same head; from head to head

    explicit __device__ __forceinline__ StageStrides(unsigned boxes_log2)
        : group(Shape::kHeads == 1 ? 8 * kRowBytes : 8 * kRowBytes << boxes_log2),
          head(Shape::kTileTokens * kRowBytes >> boxes_log2) {}
};

// The keys of one work item, as a loader needs them.
struct KeySpan {
    const folio_i32 *page_ids;  // of the request
    int begin, end;             // keys that some row sees
    int first;                  // first key of tile 0, a multiple of the tile
    unsigned head;              // first KV head
};

// One elected lane issues a box per page and tensor; page ids are fetched by the whole warp, 32 boxes at a
// time and one fetch ahead, so that no load waits for an id inside the loop.
template <class Shape>
class TmaLoader {
  public:
    static constexpr bool kZeroFillsRows = false;

    __device__ __forceinline__ TmaLoader(const TensorMap *k_map, const TensorMap *v_map,
                                         const FolioAttentionParams &params, const FolioDecodeLaunch &launch,
                                         unsigned ring, unsigned barriers, unsigned warp, unsigned lane)
        : k_map_(k_map), v_map_(v_map), params_(params), launch_(launch), ring_(ring), barriers_(barriers),
          warp_(warp), lane_(lane) {
        if (lane == 0) {
            for (int i = 0; i < Shape::kStages; ++i) {
                mbarrier_init(barriers + 8 * i, 1);
            }
            mbarrier_init_fence();
            tensor_map_prefetch(k_map);
            tensor_map_prefetch(v_map);
        }
        __syncwarp();
    }

    __device__ __forceinline__ void begin(const KeySpan &span, int tiles) {
        span_ = span;
        tiles_ = tiles;
        current_ = fetch(0);
        next_ = fetch(32);
    }

    // Starts the load of the warp's tile `i` into `stage`, if there is one. Called with i = 0, 1, 2 ...
    __device__ __forceinline__ void issue(int i, int stage) {
        if (i >= tiles_) {
            return;
        }
        const unsigned boxes = 1u << launch_.boxes_log2;
        const unsigned slot = (i << launch_.boxes_log2) & 31;
        if (slot == 0 && i != 0) {
            current_ = next_;
            next_ = fetch((i << launch_.boxes_log2) + 32);
        }
        const unsigned barrier = barriers_ + 8 * stage, k = ring_ + stage * Shape::kStageBytes;
        if (lane_ == 0) {
            mbarrier_arrive_expect(barrier, Shape::kStageBytes);
        }
#pragma unroll 1
        for (unsigned b = 0; b < boxes; ++b) {
            const int page = __shfl_sync(~0u, current_.page, slot + b);
            const int group = __shfl_sync(~0u, current_.group, slot + b);
            if (lane_ == 0) {
                load(k_map_, k + (b * Shape::kKBytes >> launch_.boxes_log2), barrier,
                     page * static_cast<int>(launch_.k_page_step), group);
                load(v_map_, k + Shape::kKBytes + (b * Shape::kVBytes >> launch_.boxes_log2), barrier,
                     page * static_cast<int>(launch_.v_page_step), group);
            }
        }
    }

    // Until the oldest tile in flight is in `stage`; `parity` counts the rounds of the ring.
    __device__ __forceinline__ void wait(int stage, unsigned parity) const {
        mbarrier_wait(barriers_ + 8 * stage, parity);
    }

  private:
    struct Box {
        int page, group;  // page id, or -1: a box outside the tensor, which arrives as zeros; group of 8 tokens
    };

    // Box `n` + lane of this warp's boxes.
    __device__ __forceinline__ Box fetch(int n) const {
        const int box = n + static_cast<int>(lane_);
        const int tile = box >> launch_.boxes_log2;
        const int box_tokens = Shape::kTileTokens >> launch_.boxes_log2;
        const int token = span_.first + (tile * Shape::kWarps + static_cast<int>(warp_)) * Shape::kTileTokens +
                          (box - (tile << launch_.boxes_log2)) * box_tokens;
        if (token >= span_.end || token + box_tokens <= span_.begin) {
            return {-1, 0};
        }
        const unsigned page = static_cast<unsigned>(token) / params_.page_size;
        return {span_.page_ids[page], static_cast<int>((token - page * params_.page_size) >> 3)};
    }

    __device__ __forceinline__ void load(const TensorMap *map, unsigned dst, unsigned barrier, int page_base,
                                         int group) const {
        const int head = static_cast<int>(span_.head);
        const int c3 = launch_.head_major ? group : page_base + group;
        const int c4 = launch_.head_major ? page_base + head : head;
        tma_load_5d(dst, map, barrier, 0, 0, 0, c3, c4, launch_.kv_evict_first ? kEvictFirst : kEvictNormal);
    }

    const TensorMap *k_map_, *v_map_;
    const FolioAttentionParams &params_;
    const FolioDecodeLaunch &launch_;
    unsigned ring_, barriers_, warp_, lane_;
    KeySpan span_;
    int tiles_;
    Box current_, next_;
};

// Every lane copies 16-byte pieces of rows, wherever the rows are; lane t holds the place of token t of the
// next tile. Keys that no row sees are not read and become zeros.
template <class Shape>
class GatherLoader {
  public:
    static constexpr bool kZeroFillsRows = true;

    __device__ __forceinline__ GatherLoader(const TensorMap *, const TensorMap *, const FolioAttentionParams &params,
                                            const FolioDecodeLaunch &, unsigned ring, unsigned, unsigned warp,
                                            unsigned lane)
        : params_(params), ring_(ring), warp_(warp), lane_(lane) {}

    __device__ __forceinline__ void begin(const KeySpan &span, int tiles) {
        span_ = span;
        tiles_ = tiles;
        next_ = fetch(0);
    }

    __device__ __forceinline__ void issue(int i, int stage) {
        if (i < tiles_) {
            const Place place = next_;
            next_ = fetch(i + 1);
            const unsigned k = ring_ + stage * Shape::kStageBytes;
#pragma unroll 1
            for (int h = 0; h < Shape::kHeads; ++h) {
                copy<Shape::kKRowBytes>(params_.k, k, h, place);
                copy<Shape::kVRowBytes>(params_.v, k + Shape::kKBytes, h, place);
            }
        }
        // A group per call, empty or not: wait() counts calls.
        cp_async_commit();
    }

    __device__ __forceinline__ void wait(int, unsigned) const {
        cp_async_wait<Shape::kStages - 1>();
        __syncwarp();
    }

  private:
    struct Place {
        int page, token;  // page id, or -1 for a key that no row sees; token within the page
    };

    __device__ __forceinline__ Place fetch(int tile) const {
        const int token = span_.first + (tile * Shape::kWarps + static_cast<int>(warp_)) * Shape::kTileTokens +
                          static_cast<int>(lane_);
        if (lane_ >= Shape::kTileTokens || token >= span_.end || token < span_.begin) {
            return {-1, 0};
        }
        const unsigned page = static_cast<unsigned>(token) / params_.page_size;
        return {span_.page_ids[page], static_cast<int>(token - page * params_.page_size)};
    }

    template <int kRowBytes>
    __device__ __forceinline__ void copy(const FolioCache &cache, unsigned tile, int h, const Place &place) const {
        using Rows = RowTile<kRowBytes>;
        const char *head =
            static_cast<const char *>(cache.data) + (span_.head + h) * cache.stride_head * FOLIO_KV_BYTES;
        const unsigned rows = tile + h * Shape::kTileTokens * kRowBytes;
        static_assert(Shape::kTileTokens * Rows::kRowChunks % 32 == 0);
#pragma unroll
        for (int n = 0; n < Shape::kTileTokens * Rows::kRowChunks / 32; ++n) {
            const unsigned piece = n * 32 + lane_;
            const unsigned row = piece / Rows::kRowChunks, chunk = piece % Rows::kRowChunks;
            const folio_i64 page = __shfl_sync(~0u, place.page, row), token = __shfl_sync(~0u, place.token, row);
            const folio_i64 element = (page < 0 ? 0 : page) * cache.stride_page + token * cache.stride_token;
            cp_async_16(rows + row / 8 * Rows::kGroupBytes + Rows::at(row & 7, chunk),
                        head + element * FOLIO_KV_BYTES + chunk * 16, page >= 0);
        }
    }

    const FolioAttentionParams &params_;
    unsigned ring_, warp_, lane_;
    KeySpan span_;
    int tiles_;
    Place next_;
};

}  // namespace folio
