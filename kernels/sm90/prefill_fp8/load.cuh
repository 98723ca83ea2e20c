// The loading warp of the Hopper fp8 prefill kernel: it picks the tiles of the CTA, publishes their records, and loads Q,
// K and V by TMA. No arithmetic on their elements: transpose.cuh makes V an operand.
#pragma once

#include "sm90/prefill_fp8/tile.cuh"

namespace folio::prefill_fp8 {

constexpr int OUTSIDE = -256;  // a coordinate whose box, of at most 32 tokens, reads as zeros

class Loader {
public:
    __device__ __forceinline__ Loader(const FolioPrefillFp8Params &params, const TensorMap *q_map,
                                      const TensorMap *k_map, const TensorMap *v_map, u32 shared)
        : all(params), params(params.attention), q_map(q_map), k_map(k_map), v_map(v_map), shared(shared) {
        num_tiles = this->params.plan.counts[0] * head_blocks();
    }

    // Tiles are items times head blocks; neighbours have the same item. The first is the CTA's by its index.
    __device__ __forceinline__ void run() {
        const Tile *tile = announce(blockIdx.x);
        while (tile->num_steps != 0) tile = load_blocks(*tile);
    }

private:
    // Computed where they are used: this warp has 32 registers.
    static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ u32 head_blocks() const { return params.num_qo_heads / packed_heads(params); }

    // Every CTA that had work draws numbers until one is beyond the last tile, so that num_tiles are drawn in all. The
    // CTA that draws the last of them clears the counter for the next run.
    __device__ __forceinline__ u32 next_tile() const {
        u32 drawn = 0;
        if (lane() == 0) {
            drawn = atomicAdd(params.plan.next_tile, 1);
            if (drawn == num_tiles - 1) *params.plan.next_tile = 0;
        }
        return __shfl_sync(FULL_WARP, drawn, 0) + gridDim.x;
    }

    // Publishes a tile and loads its queries. A number beyond the last tile ends the other warps' work.
    __device__ __forceinline__ const Tile *announce(u32 index) {
        Tile &tile = shared_tiles()[slot.index()];
        if (lane() == 0) {
            mbarrier_wait(shared + TILE_READ + 8 * slot.index(), slot.parity() ^ 1);
            tile = index < num_tiles ? make_tile(params, index / head_blocks(), index % head_blocks()) : Tile{};
            mbarrier_arrive(shared + TILE_FULL + 8 * slot.index());
            if (tile.num_steps != 0) load_queries(tile);
        }
        __syncwarp();
        slot.advance();
        return &tile;
    }

    // Tiles and buffers of queries go round together.
    __device__ __forceinline__ void load_queries(const Tile &tile) const {
        const u32 index = slot.count % QUERY_STAGES, parity = slot.count / QUERY_STAGES % 2;
        mbarrier_wait(shared + QUERY_EMPTY + 8 * index, parity ^ 1);
        const u32 full = shared + QUERY_FULL + 8 * index;
        mbarrier_arrive_expect(full, CONSUMERS * QUERY_BYTES);
#pragma unroll 1
        for (u32 consumer = 0; consumer < CONSUMERS; ++consumer) {
            tma_load_4d(shared + QUERIES + (index * CONSUMERS + consumer) * QUERY_BYTES, q_map, full, 0, tile.head,
                        tile.token + consumer * (GROUP_ROWS >> tile.pack_shift), 0);
        }
    }

    // A box per lane. The page of the next step is looked up a step ahead. Answers the next tile: it is picked two steps
    // before the end, where this warp would else wait for a buffer, because its record and its first keys are 3000
    // clocks away.
    __device__ __forceinline__ const Tile *load_blocks(const Tile &tile) {
        constexpr int AHEAD = 2;
        const Tile *next = nullptr;
        int token = tile.first_block * BLOCK + static_cast<int>(lane() * box_tokens(params));
        int group = find(tile, token);
#pragma unroll 1
        for (int remaining = tile.num_steps; remaining > 0; --remaining) {
            if (remaining <= AHEAD && next == nullptr) next = announce(next_tile());
            const int now = group;
            token -= BLOCK;
            if (remaining > 1) group = find(tile, token);
            load(KEYS, KEY_FULL, KEY_EMPTY, k_map, tile.kv_head, now);
            load(RAW_VALUES, RAW_FULL, RAW_EMPTY, v_map, tile.kv_head, now);
            block.advance();
        }
        return next;
    }

    // Whether this lane has a box of a step.
    __device__ __forceinline__ bool issues() const { return lane() * box_tokens(params) < BLOCK; }

    // Coordinate of the 8-token group in which this lane's box begins. Boxes past the last key, and pages that the cache
    // does not have, read as zeros.
    __device__ __forceinline__ int find(const Tile &tile, int token) const {
        if (!issues() || token >= tile.kv_end) return OUTSIDE;
        const u32 page = static_cast<u32>(token) / params.page_size, id = params.plan.page_ids[tile.source + page];
        const u32 group = id * all.page_groups + (token - page * params.page_size) / 8;
        return id < params.num_pages ? static_cast<int>(group) : OUTSIDE;
    }

    // Boxes that read as zeros count in full.
    __device__ __forceinline__ void load(u32 buffers, u32 full_barriers, u32 empty_barriers, const TensorMap *map,
                                         u32 head, int group) const {
        mbarrier_wait(shared + empty_barriers + 8 * block.index(), block.parity() ^ 1);
        const u32 full = shared + full_barriers + 8 * block.index();
        if (lane() == 0) mbarrier_arrive_expect(full, KEY_BYTES);
        __syncwarp();
        if (!issues()) return;
        const u32 row = lane() * box_tokens(params);
        tma_load_5d(shared + buffers + block.index() * KEY_BYTES + row * ROW, map, full, 0, 0, 0, head, group);
    }

    const FolioPrefillFp8Params &all;
    const FolioAttentionParams &params;
    const TensorMap *q_map, *k_map, *v_map;
    u32 shared, num_tiles;
    Ring<STAGES> block;
    Ring<TILE_SLOTS> slot;
};

}  // namespace folio::prefill_fp8
