// The producer warpgroup of the Hopper prefill kernel: brings Q, K and V to shared memory by TMA. Warps 0 and
// 2 load the even and odd boxes of K, warps 1 and 3 those of V; a lane issues one box, because one lane that
// issues them all costs 54 clocks for each. The V warps also bring the Q rows of the warpgroups, and with
// them the order that says what to do.
#pragma once

#include "sm90/prefill_tile.cuh"

namespace folio::prefill {

constexpr int kOutside = -256;  // a coordinate whose box, of at most 256 groups, reads as zeros

// The queries of consumer warpgroups `half`, `half` + 2, ... and their orders.
class QueryLoader {
public:
    __device__ __forceinline__ QueryLoader(const FolioAttentionParams &params, const TensorMap *map,
                                           unsigned shared, unsigned half, unsigned lane)
        : params(params), map(map), shared(shared), half(half), lane(lane), span(params) {}

    __device__ __forceinline__ void load(const Tile &tile, const Steps &steps) {
        for (unsigned consumer = half; consumer < kConsumers; consumer += 2) {
            const unsigned buffer = wait_empty(consumer);
            if (lane != 0) continue;
            give(consumer, make_order(params, tile, steps, span, consumer));
            const unsigned full = shared + kQueryFull + 8 * buffer;
            mbarrier_arrive_expect(full, kQueryBytes);
            tma_load_4d(shared + kQueries + buffer * kQueryBytes, map, full, 0, tile.head,
                        tile.token + consumer * (kGroupRows / packed_heads(params)), 0);
        }
        advance();
    }

    __device__ __forceinline__ void finish() {
        for (unsigned consumer = half; consumer < kConsumers; consumer += 2) {
            const unsigned buffer = wait_empty(consumer);
            if (lane != 0) continue;
            give(consumer, Order{});
            mbarrier_arrive(shared + kQueryFull + 8 * buffer);
        }
    }

private:
    __device__ __forceinline__ unsigned wait_empty(unsigned consumer) {
        const unsigned buffer = ring.index * kConsumers + consumer;
        mbarrier_wait(shared + kQueryEmpty + 8 * buffer, ring.parity ^ 1);
        return buffer;
    }

    // Tile t + 4 takes the slot of tile t when the queries of tile t + 4 - kQueryStages are released, which a
    // warpgroup does after the output of the tile before that.
    __device__ __forceinline__ void give(unsigned consumer, const Order &order) {
        static_assert(kQueryStages <= kNumOrders - 2);
        const unsigned address = shared + kOrders + (consumer * kNumOrders + slot) * sizeof(Order);
        const int *words = reinterpret_cast<const int *>(&order);
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(Order)) / 4; ++i) {
            asm volatile("st.shared.s32 [%0], %1;" ::"r"(address + 4 * i), "r"(words[i]) : "memory");
        }
    }

    __device__ __forceinline__ void advance() {
        ring.advance();
        slot = (slot + 1) % kNumOrders;
    }

    const FolioAttentionParams &params;
    const TensorMap *map;
    unsigned shared, half, lane, slot = 0;
    Span span;
    Ring<kQueryStages> ring;
};

// One of K and V: `kDim` columns, barriers and tiles at the given offsets.
template <int kDim, unsigned kTiles, unsigned kFull, unsigned kEmpty>
class CacheLoader {
public:
    __device__ __forceinline__ CacheLoader(const FolioAttentionParams &params, const FolioCache &cache,
                                           const TensorMap *map, unsigned shared, unsigned half, unsigned lane)
        : params(params), map(map), shared(shared), leads(half == 0 && lane == 0), box(2 * lane + half) {
        groups_per_page = static_cast<unsigned>(cache.stride_page >> 3) / static_cast<unsigned>(cache.stride_token);
    }

    __device__ __forceinline__ void load(const Tile &tile, const Steps &steps) {
        const int kv_head = tile.head / (params.num_qo_heads / params.num_kv_heads);
        if constexpr (kPaged) {
            load_paged(tile, steps, kv_head);
        } else {
            load_ragged(tile, steps, kv_head);
        }
    }

private:
    static constexpr unsigned kBytes = kBlock * kDim * 2;

    // Waits for a free buffer and announces its bytes; OOB boxes count in full.
    __device__ __forceinline__ unsigned acquire() {
        mbarrier_wait(shared + kEmpty + 8 * ring.index, ring.parity ^ 1);
        const unsigned full = shared + kFull + 8 * ring.index;
        if (leads) mbarrier_arrive_expect(full, kBytes);
        __syncwarp();
        return full;
    }

    // The page id of the next step is fetched a step ahead.
    __device__ __forceinline__ void load_paged(const Tile &tile, const Steps &steps, int kv_head) {
        const unsigned tokens = box_tokens(params);
        const folio_i32 *ids = params.plan.page_ids + tile.source;
        int token = steps.first * kBlock + static_cast<int>(box * tokens);
        const bool issues = box < kBlock / tokens;
        int group = issues ? group_of(ids, token, tile.kv_end) : 0;
#pragma unroll 1
        for (int step = 0; step < steps.count; ++step) {
            const int now = group;
            token -= kBlock;
            if (issues && step + 1 < steps.count) group = group_of(ids, token, tile.kv_end);
            const unsigned full = acquire();
            if (issues) {
                tma_load_5d(shared + kTiles + ring.index * kBytes + box * tokens * kDim * 2, map, full, 0, 0, 0,
                            kv_head, now);
            }
            ring.advance();
        }
    }

    // Coordinate of the 8-token group in which `token` begins a box.
    __device__ __forceinline__ int group_of(const folio_i32 *ids, int token, int kv_end) const {
        if (token >= kv_end) return kOutside;
        const unsigned page = static_cast<unsigned>(token) / params.page_size;
        return ids[page] * groups_per_page + (token - page * params.page_size) / 8;
    }

    __device__ __forceinline__ void load_ragged(const Tile &tile, const Steps &steps, int kv_head) {
        int row = static_cast<int>(tile.source) + steps.first * kBlock;
#pragma unroll 1
        for (int step = 0; step < steps.count; ++step, row -= kBlock) {
            const unsigned full = acquire();
            if (box < kDim / 64) {
                tma_load_3d(shared + kTiles + ring.index * kBytes + box * kBlock * 128, map, full, 64 * box, row,
                            kv_head);
            }
            ring.advance();
        }
    }

    const FolioAttentionParams &params;
    const TensorMap *map;
    unsigned shared;
    bool leads;
    unsigned box, groups_per_page;
    Ring<kStages> ring;
};

__device__ __forceinline__ void produce(const FolioAttentionParams &params, const TensorMap *q_map,
                                        const TensorMap *k_map, const TensorMap *v_map, unsigned shared) {
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const unsigned half = warp / 2;
    const Span span(params);
    TileWalk walk(params, lane);
    if (warp % 2 == 0) {
        CacheLoader<kDimQk, kKeys, kKeyFull, kKeyEmpty> keys(params, params.k, k_map, shared, half, lane);
        while (!walk.done()) {
            const Tile tile = walk.take();
            keys.load(tile, Steps(tile, span));
        }
    } else {
        QueryLoader queries(params, q_map, shared, half, lane);
        CacheLoader<kDimVo, kValues, kValueFull, kValueEmpty> values(params, params.v, v_map, shared, half, lane);
        while (!walk.done()) {
            const Tile tile = walk.take();
            const Steps steps(tile, span);
            queries.load(tile, steps);
            values.load(tile, steps);
        }
        queries.finish();
    }
}

}  // namespace folio::prefill
