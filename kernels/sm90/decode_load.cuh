// How a warp of the decode kernel fills its own ring of K/V stages: by TMA boxes, or by gathering rows with
// cp.async where pages are too small or oddly strided for a box. Both leave zeros for keys that lie in pages no
// row sees.
//
// A stage is K then V, each [box][KV head][tokens of a box / 8][8 rows]. Neighbouring heads are loaded together
// because their rows are neighbours in memory: at 128 bytes a row, DRAM gives 5 % more for two heads at a time.
#pragma once

#include "common/tma.cuh"
#include "sm90/decode_tile.cuh"

namespace folio::decode {

// Heads and tokens per tile, dims and element size of rows, and the rings of one instantiation.
template <int kHeads_, int kTileTokens_, int kDimQk, int kDimVo, int kElementBytes_, int kWarps_>
struct RingShape {
    static constexpr int kHeads = kHeads_, kTileTokens = kTileTokens_, kElementBytes = kElementBytes_;
    static constexpr int kKRowBytes = kDimQk * kElementBytes, kVRowBytes = kDimVo * kElementBytes;
    static constexpr int kWarps = kWarps_;
    static constexpr int kKBytes = kHeads * kTileTokens * kKRowBytes, kVBytes = kHeads * kTileTokens * kVRowBytes;
    static constexpr int kStageBytes = kKBytes + kVBytes;
    // 96 KiB in flight hide the latency of DRAM, and two CTAs have room on a multiprocessor.
    static constexpr int kMostStages = 96 * 1024 / (kWarps * kStageBytes);
    static constexpr int kStages = kMostStages < 4 ? kMostStages : 4;
    static constexpr int kWarpBytes = kStages * kStageBytes;
    static constexpr int kRingBytes = kWarps * kWarpBytes;
    // A lane holds the place of one token in GatherLoader; strides between groups are worked out for 16 tokens.
    static_assert(kTileTokens % 16 == 0 && kTileTokens <= 32 && (kHeads == 1 || kTileTokens == 16));
    static_assert(kStages >= 2);
};

// Byte distances inside a stage, for rows of kRowBytes.
template <class Shape, int kRowBytes>
struct StageStrides {
    u32 group, head;  // from 8 tokens to the next 8 of the same head; from head to head

    explicit __device__ __forceinline__ StageStrides(u32 boxes_log2)
        : group(Shape::kHeads == 1 ? 8 * kRowBytes : 8 * kRowBytes << boxes_log2),
          head(Shape::kTileTokens * kRowBytes >> boxes_log2) {}
};

// The keys of one work item, as a loader needs them.
struct KeySpan {
    const i32 *page_ids;  // of the request
    int begin, end;             // keys that some row sees
    int first;                  // first key of tile 0, a multiple of the tile
    u32 head;              // first KV head
};

// One elected lane issues a box per page and tensor; page ids are fetched by the whole warp, 32 boxes at a
// time and one fetch ahead, so that no load waits for an id inside the loop.
template <class Shape>
class TmaLoader {
  public:
    static constexpr bool kZeroFillsRows = false;

    __device__ __forceinline__ TmaLoader(const TensorMap *k_map, const TensorMap *v_map,
                                         const FolioDecodeParams &params, u32 ring, u32 barriers,
                                         u32 warp, u32 lane)
        : k_map_(k_map), v_map_(v_map), params_(params), ring_(ring), barriers_(barriers), warp_(warp), lane_(lane) {
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
        const u32 boxes = 1u << params_.boxes_log2;
        const u32 slot = (i << params_.boxes_log2) & 31;
        if (slot == 0 && i != 0) {
            current_ = next_;
            next_ = fetch((i << params_.boxes_log2) + 32);
        }
        const u32 barrier = barriers_ + 8 * stage, k = ring_ + stage * Shape::kStageBytes;
        if (lane_ == 0) {
            mbarrier_arrive_expect(barrier, Shape::kStageBytes);
        }
#pragma unroll 1
        for (u32 b = 0; b < boxes; ++b) {
            const int page = __shfl_sync(~0u, current_.page, slot + b);
            const int group = __shfl_sync(~0u, current_.group, slot + b);
            if (lane_ == 0) {
                load(k_map_, k + (b * Shape::kKBytes >> params_.boxes_log2), barrier,
                     page * static_cast<int>(params_.k_page_step), group);
                load(v_map_, k + Shape::kKBytes + (b * Shape::kVBytes >> params_.boxes_log2), barrier,
                     page * static_cast<int>(params_.v_page_step), group);
            }
        }
    }

    // Until the oldest tile in flight is in `stage`; `parity` counts the rounds of the ring.
    __device__ __forceinline__ void wait(int stage, u32 parity) const {
        mbarrier_wait(barriers_ + 8 * stage, parity);
    }

  private:
    struct Box {
        int page, group;  // page id, or -1: a box outside the tensor, which arrives as zeros; group of 8 tokens
    };

    // Box `n` + lane of this warp's boxes.
    __device__ __forceinline__ Box fetch(int n) const {
        const int box = n + static_cast<int>(lane_);
        const int tile = box >> params_.boxes_log2;
        const int box_tokens = Shape::kTileTokens >> params_.boxes_log2;
        const int token = span_.first + (tile * Shape::kWarps + static_cast<int>(warp_)) * Shape::kTileTokens +
                          (box - (tile << params_.boxes_log2)) * box_tokens;
        if (token >= span_.end || token + box_tokens <= span_.begin) {
            return {-1, 0};
        }
        const u32 page = static_cast<u32>(token) / params_.attention.page_size;
        return {span_.page_ids[page], static_cast<int>((token - page * params_.attention.page_size) >> 3)};
    }

    __device__ __forceinline__ void load(const TensorMap *map, u32 dst, u32 barrier, int page_base,
                                         int group) const {
        const int head = static_cast<int>(span_.head);
        const int c3 = params_.pages_by_head ? group : page_base + group;
        const int c4 = params_.pages_by_head ? page_base + head : head;
        tma_load_5d(dst, map, barrier, 0, 0, 0, c3, c4, params_.kv_evict_first ? kEvictFirst : kEvictNormal);
    }

    const TensorMap *k_map_, *v_map_;
    const FolioDecodeParams &params_;
    u32 ring_, barriers_, warp_, lane_;
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

    __device__ __forceinline__ GatherLoader(const TensorMap *, const TensorMap *, const FolioDecodeParams &params,
                                            u32 ring, u32, u32 warp, u32 lane)
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
            const u32 k = ring_ + stage * Shape::kStageBytes;
#pragma unroll 1
            for (int h = 0; h < Shape::kHeads; ++h) {
                copy<Shape::kKRowBytes>(params_.attention.k, k, h, place);
                copy<Shape::kVRowBytes>(params_.attention.v, k + Shape::kKBytes, h, place);
            }
        }
        // A group per call, empty or not: wait() counts calls.
        cp_async_commit();
    }

    __device__ __forceinline__ void wait(int, u32) const {
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
        const u32 page = static_cast<u32>(token) / params_.attention.page_size;
        return {span_.page_ids[page], static_cast<int>(token - page * params_.attention.page_size)};
    }

    template <int kRowBytes>
    __device__ __forceinline__ void copy(const FolioCache &cache, u32 tile, int h, const Place &place) const {
        using Rows = RowTile<kRowBytes>;
        const char *head =
            static_cast<const char *>(cache.data) + (span_.head + h) * cache.stride_head * Shape::kElementBytes;
        const u32 rows = tile + h * Shape::kTileTokens * kRowBytes;
        static_assert(Shape::kTileTokens * Rows::kRowChunks % 32 == 0);
#pragma unroll
        for (int n = 0; n < Shape::kTileTokens * Rows::kRowChunks / 32; ++n) {
            const u32 piece = n * 32 + lane_;
            const u32 row = piece / Rows::kRowChunks, chunk = piece % Rows::kRowChunks;
            const i64 page = __shfl_sync(~0u, place.page, row), token = __shfl_sync(~0u, place.token, row);
            const i64 element = (page < 0 ? 0 : page) * cache.stride_page + token * cache.stride_token;
            cp_async<16>(rows + row / 8 * Rows::kGroupBytes + Rows::at(row & 7, chunk),
                         head + element * Shape::kElementBytes + chunk * 16, page >= 0 ? 16 : 0);
        }
    }

    const FolioDecodeParams &params_;
    u32 ring_, warp_, lane_;
    KeySpan span_;
    int tiles_;
    Place next_;
};

}  // namespace folio::decode
