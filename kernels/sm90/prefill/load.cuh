// The producer warpgroup of the Hopper prefill kernel: it picks the tiles of the CTA and loads Q, K and V to shared
// memory by TMA. Warp 0 loads K and warp 1 loads V, a box per lane, because one lane that issues them all needs 54
// clocks for each. Warp 2 picks tiles, publishes them and loads Q. No arithmetic on their elements.
#pragma once

#include "sm90/prefill/own_keys.cuh"

namespace folio::prefill {

// Steps that cover the loads between the choice of a tile and its first keys, 4000 clocks.
constexpr int COVER = 3;

// Of who asks for the keys of a step, when so many steps are left of a tile: the next one may be chosen.
__device__ __forceinline__ void announce_end(u32 shared, int remaining) {
    if (remaining == COVER) mbarrier_arrive(shared + TILE_ENDS);
}
constexpr int OUTSIDE = -256;  // a coordinate whose box, of at most 256 groups, reads as zeros

// Picks tiles: the first by the CTA's index, further ones from a counter that all CTAs share. One lane does it.
class Scheduler {
public:
    __device__ __forceinline__ Scheduler(const FolioPrefillParams &params, const TensorMap *q_map, u8 *shared_bytes)
        : params(params),
          q_map(q_map),
          shared(shared_address(shared_bytes)),
          tiles(reinterpret_cast<Tile *>(shared_bytes + TILES)) {
        TileOrder::prefetch_first(params);
    }

    __device__ __forceinline__ void run() {
        allow_idle_dependents(params.attention.plan);
        u32 index = blockIdx.x;
#pragma unroll 1
        while (true) {
            const Order order(params);
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
        // Near the end of `tile`: a long one would keep the next from others for as long as it lasts.
        if (tile.num_steps >= COVER) {
            mbarrier_wait(shared + TILE_ENDS, ends);
            ends ^= 1;
        }
        u32 *counter = params.attention.plan.next_tile;
        const u32 drawn = atomicAdd(counter, 1);
        if (drawn == Order(params).num_tiles() - 1) *counter = 0;
        return drawn + gridDim.x;
    }

    // To the loaders by a barrier of its own, to the consumers by that of their queries. Loaders say when they
    // have read a slot. Consumers have read that of tile t - 4 when they release Q of tile t - 3, and at tile t
    // that was waited for, in load_queries.
    __device__ __forceinline__ const Tile &announce(const Tile &tile) {
        static_assert(QUERY_STAGES <= 2 && TILE_SLOTS >= 4);
        mbarrier_wait(shared + TILE_READ + 8 * slot.index(), slot.parity() ^ 1);
        Tile *const announced = tiles + slot.index() * TILE_RECORDS;
#pragma unroll 1
        for (u32 i = 0; i < TILE_RECORDS; ++i) announced[i] = record_of(tile, i);
        mbarrier_arrive(shared + TILE_FULL + 8 * slot.index());
        slot.advance();
        return *announced;
    }

    __device__ __forceinline__ u32 wait_queries(u32 consumer) const {
        const u32 buffer = query.index * CONSUMERS + consumer;
        mbarrier_wait(shared + QUERY_EMPTY + 8 * buffer, query.parity ^ 1);
        return buffer;
    }

    __device__ __forceinline__ void load_queries(const Tile &tile, u32 consumer) const {
        const u32 buffer = wait_queries(consumer), full = shared + QUERY_FULL + 8 * buffer;
        const Tile &own = (&tile)[OWN_KEYS ? consumer : 0];
        const u32 token = own.token + (OWN_KEYS ? 0 : consumer * own.group_positions());
        // Rows that no position has keep what was there: finite or not, it stays in their own rows.
        mbarrier_arrive_expect(full, own.group_positions() * own.packing.heads * (QUERY_BYTES / GROUP_ROWS));
#pragma unroll 1
        for (u32 block = 0; block < KEY_COLUMN_BLOCKS; ++block) {
            const u32 target = shared + QUERIES + buffer * QUERY_BYTES + block * QUERY_COLUMN_STRIDE;
            tma_load_3d(target, q_map, full, BLOCK_COLUMNS * block, own.head, token);
        }
    }

    const FolioPrefillParams &params;
    const TensorMap *q_map;
    u32 shared;
    Tile *tiles;
    Ring<QUERY_STAGES> query;
    SlotRing slot;
    u32 ends = 0;  // parity of TILE_ENDS
};

// What a loader needs of a tile.
struct Work {
    int num_steps, first_block, kv_end;
    u32 kv_head;
    i64 source;
    u32 key_sets;
    int context_len, context_row;
};

// The tensor maps of keys and values.
struct KeyMaps {
    const TensorMap *k, *k_rope, *v;
};

// Whether a warp would not wait.
__device__ __forceinline__ bool is_over(u32 barrier, u32 parity) {
    return __any_sync(FULL_WARP, mbarrier_test(barrier, parity));
}

// The CTA's tiles, as a warp that loads reads them.
class TileReader {
public:
    __device__ __forceinline__ explicit TileReader(const u8 *shared_bytes)
        : shared(shared_address(shared_bytes)), tiles(reinterpret_cast<const Tile *>(shared_bytes + TILES)) {}

    // Whether `next` would not wait.
    __device__ __forceinline__ bool announced() const {
        return is_over(shared + TILE_FULL + 8 * slot.index(), slot.parity());
    }

    // The next one; without steps there is none.
    __device__ __forceinline__ Work next() {
        mbarrier_wait(shared + TILE_FULL + 8 * slot.index(), slot.parity());
        const Tile &tile = tiles[slot.index() * TILE_RECORDS];
        const Work work = {read(tile.num_steps),
                           read(tile.first_block),
                           read(tile.kv_end),
                           read(tile.kv_head),
                           read(tile.source),
                           OWN_KEYS ? read(tile.key_sets) : 1,
                           AFTER ? read(tile.context_len) : 0,
                           AFTER ? read(tile.context_row) : 0};
        if (is_reader()) mbarrier_arrive(shared + TILE_READ + 8 * slot.index());
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
    SlotRing slot;
};

// One of K and V: `DIM` columns, buffers and barriers at the given offsets. A whole warp. Of split keys the last `ROPE`
// columns are in a tensor without heads; half of the warp loads their boxes.
template <int DIM, int ROPE, u32 BUFFERS, u32 FULL, u32 EMPTY>
class Loader {
public:
    // `context`: of keys in front of others, of which none are where AFTER is false.
    __device__ __forceinline__ Loader(const FolioAttentionParams &params, const FolioCache &cache, const TensorMap *map,
                                      const TensorMap *rope_map, const TensorMap *context_map,
                                      const TensorMap *context_rope_map, const u8 *shared_bytes)
        : params(params),
          map(map),
          rope_map(rope_map),
          context_map(context_map),
          context_rope_map(context_rope_map),
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

    // Waits for a free buffer and announces its bytes; boxes that read as zeros count in full. `owner` as in own_keys.cuh.
    __device__ __forceinline__ u32 acquire(u32 owner = 0) {
        mbarrier_wait(shared + EMPTY + 8 * ring.index, ring.parity ^ 1);
        const u32 full = shared + FULL + 8 * (owner * STAGES + ring.index);
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
            if (FULL == KEY_FULL && lane == 0) announce_end(shared, remaining);
            token -= BLOCK;
            if (issues && remaining > 1) group = group_of(ids, token, work.kv_end);
#pragma unroll 1
            for (u32 set = 0; set < work.key_sets; ++set) {
                const u32 owner = work.key_sets > 1 ? 1 + set : 0;
                const u32 full = acquire(owner), target = shared + BUFFERS + ring.index * BYTES + offset;
                if (issues) {
#pragma unroll 1
                    for (u32 box = first_box; box < boxes; box += 2) {
                        const u32 column = BLOCK_COLUMNS * box;
                        tma_load_5d(target + box * COLUMN_BLOCK_BYTES, source, full, column, 0, 0, head + set, now);
                    }
                }
                ring.advance();
            }
        }
    }

    // Coordinate of the 8-token group in which `token` begins a box. Pages that the cache does not have read as zeros.
    __device__ __forceinline__ int group_of(const i32 *ids, int token, int kv_end) const {
        if (token >= kv_end) return OUTSIDE;
        const u32 page = static_cast<u32>(token) / params.page_size, id = ids[page];
        return id < params.num_pages ? id * groups_per_page + (token - page * params.page_size) / 8 : OUTSIDE;
    }

    __device__ __forceinline__ void load_ragged(const Work &work) {
        const int first = static_cast<int>(work.source);
        int row = first + work.first_block * BLOCK, context_behind = 0;
        if constexpr (AFTER) {
            const int rows_of_context = (work.context_len + BLOCK - 1) / BLOCK * BLOCK;
            row -= rows_of_context;
            context_behind = work.context_row + rows_of_context - first;
        }
#pragma unroll 1
        for (int remaining = work.num_steps; remaining > 0; --remaining, row -= BLOCK) {
            if (FULL == KEY_FULL && lane == 0) announce_end(shared, remaining);
            const u32 full = acquire();
            const u32 target = shared + BUFFERS + ring.index * BYTES + lane * COLUMN_BLOCK_BYTES;
            const bool in_context = AFTER && row < first;
            const int place = in_context ? row + context_behind : row;
            if (lane < OWN_BLOCKS) {
                tma_load_3d(target, in_context ? context_map : map, full, BLOCK_COLUMNS * lane, place, work.kv_head);
            } else if (lane < COLUMN_BLOCKS) {
                tma_load_3d(target, in_context ? context_rope_map : rope_map, full, BLOCK_COLUMNS * (lane - OWN_BLOCKS),
                            place, 0);
            }
            ring.advance();
        }
    }

    const FolioAttentionParams &params;
    const TensorMap *map, *rope_map, *context_map, *context_rope_map;
    u32 shared;
    TileReader reader;
    u32 lane, groups_per_page;
    Ring<STAGES> ring;
};

__device__ __forceinline__ void produce(const FolioPrefillParams &params, const TensorMap *q_map, const KeyMaps &maps,
                                        const KeyMaps &context, u8 *shared_bytes) {
    const FolioAttentionParams &attention = params.attention;
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    if (warp == 0) {
        Loader<DIM_QK, ROPE_DIM, KEYS, KEY_FULL, KEY_EMPTY>(attention, attention.k, maps.k, maps.k_rope, context.k,
                                                            context.k_rope, shared_bytes)
            .run();
    } else if (warp == 1) {
        Loader<DIM_VO, 0, VALUES, VALUE_FULL, VALUE_EMPTY>(attention, attention.v, maps.v, maps.v, context.v, context.v,
                                                           shared_bytes)
            .run();
    } else if (warp == 2 && threadIdx.x % 32 == 0) {
        Scheduler(params, q_map, shared_bytes).run();
    }
}

}  // namespace folio::prefill
