// The producer warpgroup of the Hopper prefill kernel: it picks the tiles of the CTA and loads Q, K and V to shared
// memory by TMA. Warp 0 loads K and warp 1 loads V, a box per lane, because one lane that issues them all needs 54
// clocks for each. Warp 2 picks tiles, publishes them and loads Q. No arithmetic on their elements.
#pragma once

#include "sm90/prefill/tile.cuh"

namespace folio::prefill {

constexpr int OUTSIDE = -256;  // a coordinate whose box, of at most 256 groups, reads as zeros

// Numbers tiles, which are items times head blocks. Where the keys of all heads exceed the L2, heads come in sections
// whose keys do not: the items of one section, then those of the next, so that most tiles find their keys there. Within
// a section neighbours have the same item. Under a causal mask the last quarter of the items, the short ones, is left
// for the end with all heads: it fills the gaps that long tiles of the last section leave.
//
// Derived anew for every tile, off the critical path: its one lane has few registers.
class TileOrder {
public:
    __device__ __forceinline__ explicit TileOrder(const FolioAttentionParams &params)
        : num_items(params.plan.counts[0]), num_heads(head_blocks(params)) {}

    // Prefetches the item that the CTA's first tile most often is of.
    static __device__ __forceinline__ void prefetch_first(const FolioAttentionParams &params) {
        const u32 item = blockIdx.x / head_blocks(params);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(params.plan.items + item));
        // An item may lie across two cache lines.
        asm volatile("prefetch.global.L2 [%0];" ::"l"(&params.plan.items[item].position));
    }

    __device__ __forceinline__ u32 num_tiles() const { return num_items * num_heads; }

    __device__ __forceinline__ Tile tile(const FolioAttentionParams &params, u32 index) const {
        const u32 sectioned = params.mask_mode == FOLIO_MASK_CAUSAL ? num_items - num_items / 4 : num_items;
        if (index >= sectioned * num_heads) return make_tile(params, index / num_heads, index % num_heads);
        const u32 width = section_width(params);
        const u32 first = index / (sectioned * width) * width, within = index - first * sectioned;
        const u32 heads = min(width, num_heads - first), item = within / heads;
        return make_tile(params, item, first + within - item * heads);
    }

private:
    // Head blocks of a section. The first item is one of the longest request.
    __device__ __forceinline__ u32 section_width(const FolioAttentionParams &params) const {
        const float head_bytes = static_cast<float>(params.plan.items->kv_end) * Stored::row_bytes(DIM_QK + DIM_VO);
        const u32 kv_heads = params.num_kv_heads;
        const u32 sections =
            min(static_cast<u32>(head_bytes * kv_heads / static_cast<float>(params.section_bytes)) + 1, kv_heads);
        return (kv_heads + sections - 1) / sections * (num_heads / kv_heads);
    }

    static __device__ __forceinline__ u32 head_blocks(const FolioAttentionParams &params) {
        return params.num_qo_heads / packed_heads(params);
    }

    u32 num_items, num_heads;
};

// Picks tiles: the first by the CTA's index, further ones from a counter that all CTAs share. One lane does it.
class Scheduler {
public:
    __device__ __forceinline__ Scheduler(const FolioAttentionParams &params, const TensorMap *q_map, u8 *shared_bytes)
        : params(params),
          q_map(q_map),
          shared(shared_address(shared_bytes)),
          tiles(reinterpret_cast<Tile *>(shared_bytes + TILES)) {
        TileOrder::prefetch_first(params);
    }

    __device__ __forceinline__ void run() {
        u32 index = blockIdx.x;
#pragma unroll 1
        while (true) {
            const TileOrder order(params);
            if (index >= order.num_tiles()) break;
            const Tile &tile = announce(order.tile(params, index));
#pragma unroll 1
            for (u32 consumer = 0; consumer < CONSUMERS; ++consumer) load_queries(tile, consumer);
            query.advance();
            index = next_tile(tile);
        }
        announce({});
#pragma unroll 1
        for (u32 consumer = 0; consumer < CONSUMERS; ++consumer) {
            mbarrier_arrive(shared + QUERY_FULL + 8 * wait_queries(consumer));
        }
    }

private:
    // Every CTA that had work draws numbers until one is beyond the last tile, so that num_tiles are drawn in all. The
    // CTA that draws the last of them clears the counter for the next run.
    __device__ __forceinline__ u32 next_tile(const Tile &tile) {
        // With two buffers for Q, waiting for one now keeps the choice open until the tile before `tile` is
        // done. That leaves `tile` to cover the loads between the choice and the first keys, 4000 clocks.
        constexpr int COVER = 3;
        if (QUERY_STAGES > 1 && tile.num_steps >= COVER) {
#pragma unroll 1
            for (u32 consumer = 0; consumer < CONSUMERS; ++consumer) wait_queries(consumer);
        }
        u32 *counter = params.plan.next_tile;
        const u32 drawn = atomicAdd(counter, 1);
        if (drawn == TileOrder(params).num_tiles() - 1) *counter = 0;
        return drawn + gridDim.x;
    }

    // To the loaders by a barrier of its own, to the consumers by that of their queries. Loaders say when they
    // have read a slot. Consumers have read that of tile t - 4 when they release Q of tile t - 3, and at tile t
    // that was waited for, in load_queries.
    __device__ __forceinline__ const Tile &announce(const Tile &tile) {
        static_assert(QUERY_STAGES <= 2 && TILE_SLOTS >= 4);
        mbarrier_wait(shared + TILE_READ + 8 * slot.index, slot.parity ^ 1);
        Tile &announced = tiles[slot.index];
        announced = tile;
        mbarrier_arrive(shared + TILE_FULL + 8 * slot.index);
        slot.advance();
        return announced;
    }

    __device__ __forceinline__ u32 wait_queries(u32 consumer) const {
        const u32 buffer = query.index * CONSUMERS + consumer;
        mbarrier_wait(shared + QUERY_EMPTY + 8 * buffer, query.parity ^ 1);
        return buffer;
    }

    __device__ __forceinline__ void load_queries(const Tile &tile, u32 consumer) const {
        const u32 buffer = wait_queries(consumer), full = shared + QUERY_FULL + 8 * buffer;
        const u32 token = tile.token + consumer * (GROUP_ROWS / packed_heads(params));
        mbarrier_arrive_expect(full, QUERY_BYTES);
#pragma unroll 1
        for (u32 block = 0; block < KEY_COLUMN_BLOCKS; ++block) {
            const u32 target = shared + QUERIES + buffer * QUERY_BYTES + block * QUERY_COLUMN_STRIDE;
            tma_load_3d(target, q_map, full, BLOCK_COLUMNS * block, tile.head, token);
        }
    }

    const FolioAttentionParams &params;
    const TensorMap *q_map;
    u32 shared;
    Tile *tiles;
    Ring<QUERY_STAGES> query;
    Ring<TILE_SLOTS> slot;
};

// What a loader needs of a tile.
struct Work {
    int num_steps, first_block, kv_end;
    u32 kv_head;
    i64 source;
};

// The CTA's tiles, as a warp that loads reads them.
class TileReader {
public:
    __device__ __forceinline__ explicit TileReader(const u8 *shared_bytes)
        : shared(shared_address(shared_bytes)), tiles(reinterpret_cast<const Tile *>(shared_bytes + TILES)) {}

    // The next one; without steps there is none.
    __device__ __forceinline__ Work next() {
        mbarrier_wait(shared + TILE_FULL + 8 * slot.index, slot.parity);
        const Tile &tile = tiles[slot.index];
        const Work work = {read(tile.num_steps), read(tile.first_block), read(tile.kv_end), read(tile.kv_head),
                           read(tile.source)};
        if (is_reader()) mbarrier_arrive(shared + TILE_READ + 8 * slot.index);
        slot.advance();
        return work;
    }

private:
    static __device__ __forceinline__ bool is_reader() { return threadIdx.x % 32 == 0; }

    // One lane reads, so that one arrival says that the warp has.
    template <class T>
    __device__ __forceinline__ T read(const T &field) const {
        T x = 0;
        if (is_reader()) x = field;
        return __shfl_sync(FULL_WARP, x, 0);
    }

    u32 shared;
    const Tile *tiles;
    Ring<TILE_SLOTS> slot;
};

// One of K and V: `DIM` columns, buffers and barriers at the given offsets. A whole warp. Of split keys the last `ROPE`
// columns are in a tensor without heads; half of the warp loads their boxes.
template <int DIM, int ROPE, u32 BUFFERS, u32 FULL, u32 EMPTY>
class Loader {
public:
    __device__ __forceinline__ Loader(const FolioAttentionParams &params, const FolioCache &cache, const TensorMap *map,
                                      const TensorMap *rope_map, const u8 *shared_bytes)
        : params(params),
          map(map),
          rope_map(rope_map),
          shared(shared_address(shared_bytes)),
          reader(shared_bytes),
          lane(threadIdx.x % 32),
          groups_per_page(static_cast<u32>(cache.stride_page >> 3) / static_cast<u32>(cache.stride_token)) {
        if (loads_rope()) groups_per_page = params.k_rope_page_groups;
    }

    __device__ __forceinline__ void run() {
        while (true) {
            const Work work = reader.next();
            if (work.num_steps == 0) return;
            if constexpr (PAGED) {
                load_paged(work);
            } else {
                load_ragged(work);
            }
        }
    }

private:
    static constexpr u32 COLUMN_BLOCKS = column_blocks(DIM), OWN_BLOCKS = column_blocks(DIM - ROPE);
    static constexpr u32 BYTES = COLUMN_BLOCKS * COLUMN_BLOCK_BYTES, LANES = 16;
    static_assert(BLOCK / 8 <= LANES, "a lane per box of a page");
    static_assert(ROPE == 0 || COLUMNS_TOGETHER || !PAGED, "half of the lanes load one box each");

    // For pages: whether this lane's boxes are of the rope columns.
    __device__ __forceinline__ bool loads_rope() const { return ROPE > 0 && lane >= LANES; }

    // Waits for a free buffer and announces its bytes; boxes that read as zeros count in full.
    __device__ __forceinline__ u32 acquire() {
        mbarrier_wait(shared + EMPTY + 8 * ring.index, ring.parity ^ 1);
        const u32 full = shared + FULL + 8 * ring.index;
        if (lane == 0) mbarrier_arrive_expect(full, BYTES);
        __syncwarp();
        return full;
    }

    // Lanes i and i + 16 load the same tokens: even and odd boxes of columns, or of split keys the keys' own columns and
    // those of the rope tensor. The page id of the next step is fetched a step ahead.
    __device__ __forceinline__ void load_paged(const Work &work) {
        constexpr u32 BOXES = COLUMNS_TOGETHER ? 1 : OWN_BLOCKS, BOX_BLOCKS = COLUMNS_TOGETHER ? OWN_BLOCKS : 1;
        const u32 tokens = box_tokens(params), place = lane % LANES, second = lane / LANES;
        const i32 *ids = params.plan.page_ids + work.source;
        const u32 offset =
            loads_rope() ? ROPE_KEYS + place * tokens * BLOCK_ROW_BYTES : place * tokens * BLOCK_ROW_BYTES * BOX_BLOCKS;
        const u32 first_box = ROPE > 0 ? 0 : second, boxes = loads_rope() ? 1 : BOXES;
        const u32 head = loads_rope() ? 0 : work.kv_head;
        const TensorMap *source = loads_rope() ? rope_map : map;
        int token = work.first_block * BLOCK + static_cast<int>(place * tokens);
        const bool issues = place < BLOCK / tokens && first_box < boxes;
        int group = issues ? group_of(ids, token, work.kv_end) : 0;
#pragma unroll 1
        for (int remaining = work.num_steps; remaining > 0; --remaining) {
            const int now = group;
            token -= BLOCK;
            if (issues && remaining > 1) group = group_of(ids, token, work.kv_end);
            const u32 full = acquire(), target = shared + BUFFERS + ring.index * BYTES + offset;
            if (issues) {
#pragma unroll 1
                for (u32 box = first_box; box < boxes; box += 2) {
                    const u32 column = BLOCK_COLUMNS * box;
                    tma_load_5d(target + box * COLUMN_BLOCK_BYTES, source, full, column, 0, 0, head, now);
                }
            }
            ring.advance();
        }
    }

    // Coordinate of the 8-token group in which `token` begins a box. Pages that the cache does not have read as zeros.
    __device__ __forceinline__ int group_of(const i32 *ids, int token, int kv_end) const {
        if (token >= kv_end) return OUTSIDE;
        const u32 page = static_cast<u32>(token) / params.page_size, id = ids[page];
        return id < params.num_pages ? id * groups_per_page + (token - page * params.page_size) / 8 : OUTSIDE;
    }

    __device__ __forceinline__ void load_ragged(const Work &work) {
        int row = static_cast<int>(work.source) + work.first_block * BLOCK;
#pragma unroll 1
        for (int remaining = work.num_steps; remaining > 0; --remaining, row -= BLOCK) {
            const u32 full = acquire();
            const u32 target = shared + BUFFERS + ring.index * BYTES + lane * COLUMN_BLOCK_BYTES;
            if (lane < OWN_BLOCKS) {
                tma_load_3d(target, map, full, BLOCK_COLUMNS * lane, row, work.kv_head);
            } else if (lane < COLUMN_BLOCKS) {
                tma_load_3d(target, rope_map, full, BLOCK_COLUMNS * (lane - OWN_BLOCKS), row, 0);
            }
            ring.advance();
        }
    }

    const FolioAttentionParams &params;
    const TensorMap *map, *rope_map;
    u32 shared;
    TileReader reader;
    u32 lane, groups_per_page;
    Ring<STAGES> ring;
};

__device__ __forceinline__ void produce(const FolioAttentionParams &params, const TensorMap *q_map,
                                        const TensorMap *k_map, const TensorMap *k_rope_map, const TensorMap *v_map,
                                        u8 *shared_bytes) {
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    if (warp == 0) {
        Loader<DIM_QK, ROPE_DIM, KEYS, KEY_FULL, KEY_EMPTY>(params, params.k, k_map, k_rope_map, shared_bytes).run();
    } else if (warp == 1) {
        Loader<DIM_VO, 0, VALUES, VALUE_FULL, VALUE_EMPTY>(params, params.v, v_map, v_map, shared_bytes).run();
    } else if (warp == 2 && threadIdx.x % 32 == 0) {
        Scheduler(params, q_map, shared_bytes).run();
    }
}

}  // namespace folio::prefill
