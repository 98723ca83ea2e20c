// The loading warp of the Hopper fp8 prefill kernel: it picks the tiles of the CTA, publishes their records and where their
// blocks lie, and loads Q and K by TMA, or rows of K one by one. Values are loaded where they are transposed, by
// transpose.cuh. No arithmetic on elements.
//
// A box takes the warp 65 clocks and what comes before a tile's first keys 3700, where a step takes 2000.
#pragma once

#include "ptx/bulk.cuh"
#include "sm90/prefill_fp8/gather.cuh"

namespace folio::prefill_fp8 {

// Where a lane's box of a block lies, from the last block of a tile down. It reads the id of a block's page a step before
// it looks at it.
class PageCursor {
public:
    __device__ __forceinline__ PageCursor(const FolioPrefillFp8Params &params, const Tile &tile, u32 first_token,
                                          bool issues)
        : params(params), pages(BLOCK / params.attention.page_size), tokens(BLOCK % params.attention.page_size) {
        const u32 page_size = params.attention.page_size;
        const u32 token = tile.first_block * BLOCK + first_token, page = token / page_size;
        offset = token - page * page_size;
        entry = params.attention.plan.page_ids + tile.source + page;
        id = issues && static_cast<int>(token) < tile.kv_end ? *entry : NOWHERE;
    }

    // Coordinate of the 8-token group in which the box begins. Boxes past the last key, and pages that the cache does not
    // have, are outside.
    __device__ __forceinline__ int group() const {
        const u32 page = kept(id);
        return page < params.attention.num_pages ? static_cast<int>(page * params.page_groups + offset / 8) : OUTSIDE;
    }

    // To the block before, which exists and is full.
    __device__ __forceinline__ void back(bool issues) {
        entry -= pages;
        offset -= tokens;
        if (offset < 0) {
            offset += params.attention.page_size;
            --entry;
        }
        if (issues) id = *entry;
    }

private:
    static constexpr int OUTSIDE = -256;  // a box, of at most 64 tokens, reads as zeros there
    static constexpr u32 NOWHERE = 0xffffffffu;

    const FolioPrefillFp8Params &params;
    u32 pages;
    int tokens, offset;
    const i32 *entry;
    u32 id;
};

class Loader {
public:
    __device__ __forceinline__ Loader(const FolioPrefillFp8Params &params, const TensorMap *q_map,
                                      const TensorMap *k_map, u8 *shared_bytes)
        : all(params),
          params(params.attention),
          q_map(q_map),
          k_map(k_map),
          shared(shared_address(shared_bytes)),
          lane(threadIdx.x % 32) {
        head_blocks = this->params.num_qo_heads / packed_heads(this->params);
        num_tiles = this->params.plan.counts[FOLIO_COUNT_ITEMS] * head_blocks;
    }

    // Tiles are items times head blocks; neighbours have the same item. The first is the CTA's by its index.
    __device__ __forceinline__ void run() {
        const Tile *tile = announce(blockIdx.x);
        while (tile->num_steps != 0) {
            if constexpr (GATHERED) {
                tile = load_rows(*tile);
            } else {
                tile = load(*tile);
            }
        }
    }

private:
    // Every CTA that had work draws numbers until one is beyond the last tile, so that num_tiles are drawn in all. The
    // CTA that draws the last of them clears the counter for the next run.
    __device__ __forceinline__ u32 draw() const { return lane == 0 ? atomicAdd(params.plan.next_tile, 1) : 0; }

    __device__ __forceinline__ u32 tile_of(u32 drawn) const {
        if (lane == 0 && drawn + 1 == num_tiles) *params.plan.next_tile = 0;
        u32 ctas;  // read for every tile anew: registers are short
        asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
        return __shfl_sync(FULL_WARP, drawn, 0) + ctas;
    }

    // A number beyond the last tile ends the other warps' work.
    __device__ __forceinline__ const Tile *announce(u32 index) {
        Tile *const announced = shared_tiles() + slot.index();
        if (lane == 0) {
            mbarrier_wait(shared + TILE_READ + 8 * slot.index(), slot.parity() ^ 1);
            *announced = index < num_tiles ? make_tile(params, index / head_blocks, index % head_blocks) : Tile{};
            mbarrier_arrive(shared + TILE_FULL + 8 * slot.index());
        }
        __syncwarp();
        slot.advance();
        return announced;
    }

    // The boxes of a page's tokens per lane. Answers the next tile, whose number is asked for two steps before the end.
    __device__ __forceinline__ const Tile *load(const Tile &tile) {
        const u32 tokens = box_tokens(params), head = tile.kv_head;
        const bool issues = lane < BLOCK / tokens;
        PageCursor cursor(all, tile, lane * tokens, issues);
        load_queries(tile);
        const int num_steps = tile.num_steps;
        u32 drawn = 0;
#pragma unroll 1
        for (int remaining = num_steps; remaining > 0; --remaining) {
            if (remaining == min(num_steps, 2)) drawn = draw();
            const int group = cursor.group();
            if (remaining > 1) cursor.back(issues);
            publish(group, head);
            load_keys(group, head, issues, lane * tokens);
            block.advance();
        }
        return announce(tile_of(drawn));
    }

    // As `load`, row by row.
    __device__ __forceinline__ const Tile *load_rows(const Tile &tile) {
        RowCursor<BLOCK> rows(all, tile, 0);
        load_queries(tile);
        u32 drawn = 0;
#pragma unroll 1
        for (int remaining = tile.num_steps; remaining > 0; --remaining) {
            if (remaining == min(tile.num_steps, 2)) drawn = draw();
            rows.locate(all.k);
            mbarrier_wait(shared + KEY_EMPTY + 8 * block.index(), block.parity() ^ 1);
            rows.copy(params.k, all.k, shared + KEYS + block.index() * KEY_BYTES, remaining == 1);
            mbarrier_arrive_by_copies(shared + KEY_FULL + 8 * block.index());
            block.advance();
        }
        return announce(tile_of(drawn));
    }

    // Of the tile that was announced last.
    __device__ __forceinline__ void load_queries(const Tile &tile) {
        const Ring<QUERY_STAGES> query{slot.count - 1};
        const u32 full = shared + QUERY_FULL + 8 * query.index();
        mbarrier_wait(shared + QUERY_EMPTY + 8 * query.index(), query.parity() ^ 1);
        if (lane == 0) mbarrier_arrive_expect(full, CONSUMERS * QUERY_BYTES);
        __syncwarp();
        if (lane < CONSUMERS * PARTS) {
            const u32 group = lane / PARTS, part = lane % PARTS;
            tma_load_4d(shared + QUERIES + query.index() * CONSUMERS * QUERY_BYTES + lane * QUERY_PART, q_map, full,
                        part * COLUMNS, tile.head, tile.token + group * (GROUP_ROWS >> tile.pack_shift), 0);
        }
    }

    // Tells the transposing warps where the boxes of a block begin.
    __device__ __forceinline__ void publish(int group, u32 head) {
        Place &to = shared_places()[place.index()];
        mbarrier_wait(shared + PLACE_READ + 8 * place.index(), place.parity() ^ 1);
        if (lane == 0) to.head = head;
        if (lane < MOST_BOXES) {
            to.group[lane] = group;
            mbarrier_arrive(shared + PLACE_FULL + 8 * place.index());
        }
        __syncwarp();
        place.advance();
    }

    // Boxes that read as zeros count in full.
    __device__ __forceinline__ void load_keys(int group, u32 head, bool issues, u32 row) const {
        mbarrier_wait(shared + KEY_EMPTY + 8 * block.index(), block.parity() ^ 1);
        const u32 full = shared + KEY_FULL + 8 * block.index();
        if (lane == 0) mbarrier_arrive_expect(full, KEY_BYTES);
        __syncwarp();
        if (!issues) return;
#pragma unroll
        for (u32 part = 0; part < PARTS; ++part) {
            tma_load_5d(shared + KEYS + block.index() * KEY_BYTES + part * KEY_PART + row * ROW, k_map, full,
                        part * COLUMNS, 0, 0, head, group);
        }
    }

    const FolioPrefillFp8Params &all;
    const FolioAttentionParams &params;
    const TensorMap *q_map, *k_map;
    u32 shared, lane, head_blocks, num_tiles;
    Ring<STAGES> block;
    Ring<PLACES> place;
    Ring<TILE_SLOTS> slot;
};

}  // namespace folio::prefill_fp8
