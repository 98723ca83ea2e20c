// The loading warp of the Hopper fp8 prefill kernel: it picks the tiles of the CTA, publishes their records, and loads Q,
// K and V by TMA. No arithmetic on their elements: transpose.cuh makes V an operand.
#pragma once

#include "sm90/prefill_fp8/tile.cuh"

namespace folio::prefill_fp8 {

constexpr int OUTSIDE = -256;  // a coordinate whose box, of at most 32 tokens, reads as zeros

class Loader {
public:
    __device__ __forceinline__ Loader(const FolioPrefillFp8Params &params, const TensorMap *q_map,
                                      const TensorMap *k_map, const TensorMap *v_map, u8 *shared_bytes)
        : params(params.attention),
          k_pages{k_map, params.page_groups},
          v_pages{v_map, params.page_groups},
          q_map(q_map),
          shared(shared_address(shared_bytes)),
          tiles(reinterpret_cast<Tile *>(shared_bytes + TILES)),
          lane(threadIdx.x % 32) {
        head_blocks = this->params.num_qo_heads / packed_heads(this->params);
        num_tiles = this->params.plan.counts[FOLIO_COUNT_ITEMS] * head_blocks;
    }

    // Tiles are items times head blocks; neighbours have the same item. The first is the CTA's by its index.
    __device__ __forceinline__ void run() {
        u32 index = blockIdx.x;
        while (index < num_tiles) {
            const Tile &tile = announce(index);
            load_queries(tile);
            load_blocks(tile);
            index = next_tile();
        }
        announce(index);
    }

private:
    // How a cache is read page by page.
    struct Pages {
        const TensorMap *map;
        u32 groups_per_page;
    };

    // Every CTA that had work draws numbers until one is beyond the last tile, so that num_tiles are drawn in all. The
    // CTA that draws the last of them clears the counter for the next run.
    __device__ __forceinline__ u32 next_tile() const {
        u32 drawn = 0;
        if (lane == 0) {
            drawn = atomicAdd(params.plan.next_tile, 1);
            if (drawn == num_tiles - 1) *params.plan.next_tile = 0;
        }
        return __shfl_sync(FULL_WARP, drawn, 0) + gridDim.x;
    }

    // A number beyond the last tile ends the other warps' work.
    __device__ __forceinline__ const Tile &announce(u32 index) {
        Tile &announced = tiles[slot.index()];
        if (lane == 0) {
            mbarrier_wait(shared + TILE_READ + 8 * slot.index(), slot.parity() ^ 1);
            announced = index < num_tiles ? make_tile(params, index / head_blocks, index % head_blocks) : Tile{};
            mbarrier_arrive(shared + TILE_FULL + 8 * slot.index());
        }
        __syncwarp();
        slot.advance();
        return announced;
    }

    __device__ __forceinline__ void load_queries(const Tile &tile) {
        if (lane == 0) {
            mbarrier_wait(shared + QUERY_EMPTY + 8 * query.index(), query.parity() ^ 1);
            const u32 full = shared + QUERY_FULL + 8 * query.index();
            mbarrier_arrive_expect(full, CONSUMERS * QUERY_BYTES);
#pragma unroll
            for (u32 consumer = 0; consumer < CONSUMERS; ++consumer) {
                tma_load_4d(shared + QUERIES + (query.index() * CONSUMERS + consumer) * QUERY_BYTES, q_map, full, 0,
                            tile.head, tile.token + consumer * (GROUP_ROWS >> tile.pack_shift), 0);
            }
        }
        __syncwarp();
        query.advance();
    }

    // A box per lane. The page of the next step is looked up a step ahead.
    __device__ __forceinline__ void load_blocks(const Tile &tile) {
        const u32 tokens = box_tokens(params), head = tile.kv_head;
        const i32 *ids = params.plan.page_ids + tile.source;
        const int kv_end = tile.kv_end;
        const bool issues = lane < BLOCK / tokens;
        int token = tile.first_block * BLOCK + static_cast<int>(lane * tokens);
        Place place = issues ? find(ids, token, kv_end) : Place{};
#pragma unroll 1
        for (int remaining = tile.num_steps; remaining > 0; --remaining) {
            const Place now = place;
            token -= BLOCK;
            if (issues && remaining > 1) place = find(ids, token, kv_end);
            load(KEYS, KEY_FULL, KEY_EMPTY, k_pages, now, head, issues, lane * tokens);
            load(RAW_VALUES, RAW_FULL, RAW_EMPTY, v_pages, now, head, issues, lane * tokens);
            block.advance();
        }
    }

    // A page, and a group of 8 tokens within it.
    struct Place {
        u32 page, group;
    };

    // Where a box begins. Boxes past the last key, and pages that the cache does not have, are nowhere.
    __device__ __forceinline__ Place find(const i32 *ids, int token, int kv_end) const {
        if (token >= kv_end) return {NOWHERE, 0};
        const u32 page = static_cast<u32>(token) / params.page_size, id = ids[page];
        return {id < params.num_pages ? id : NOWHERE, (token - page * params.page_size) / 8};
    }

    // Boxes that read as zeros count in full.
    __device__ __forceinline__ void load(u32 buffers, u32 full_barriers, u32 empty_barriers, const Pages &pages,
                                         Place place, u32 head, bool issues, u32 row) const {
        mbarrier_wait(shared + empty_barriers + 8 * block.index(), block.parity() ^ 1);
        const u32 full = shared + full_barriers + 8 * block.index();
        if (lane == 0) mbarrier_arrive_expect(full, KEY_BYTES);
        __syncwarp();
        if (!issues) return;
        const int group =
            place.page == NOWHERE ? OUTSIDE : static_cast<int>(place.page * pages.groups_per_page + place.group);
        tma_load_5d(shared + buffers + block.index() * KEY_BYTES + row * ROW, pages.map, full, 0, 0, 0, head, group);
    }

    static constexpr u32 NOWHERE = 0xffffffffu;

    const FolioAttentionParams &params;
    Pages k_pages, v_pages;
    const TensorMap *q_map;
    u32 shared;
    Tile *tiles;
    u32 lane, head_blocks, num_tiles;
    Ring<QUERY_STAGES> query;
    Ring<STAGES> block;
    Ring<TILE_SLOTS> slot;
};

}  // namespace folio::prefill_fp8
