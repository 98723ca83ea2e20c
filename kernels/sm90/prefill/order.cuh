// In which order the tiles of the Hopper prefill kernel are taken. Index arithmetic only.
#pragma once

#include "sm90/prefill/tile.cuh"

namespace folio::prefill {

// Numbers tiles, which are items times head blocks. Where the keys of all heads exceed the L2, heads come in sections
// whose keys do not: the items of one section, then those of the next, so that most tiles find their keys there. Within
// a section neighbours have the same item. The items of the plan's tail are left for the end with all heads, and so is the last
// quarter of the items under a causal mask, the short ones: they fill the gaps that long tiles of the last section leave. Few
// tiles have no sections: the long ones of the last section would begin when nothing is left to run beside them.
//
// Derived anew for every tile, off the critical path: its one lane has few registers.
class TileOrder {
public:
    __device__ __forceinline__ explicit TileOrder(const FolioPrefillParams &params)
        : TileOrder(params, params.attention.plan.counts[FOLIO_COUNT_ITEMS],
                    params.attention.plan.counts[FOLIO_COUNT_SMALL_ITEMS]) {}

    // Of the first items, of which so many are the tail.
    __device__ __forceinline__ TileOrder(const FolioPrefillParams &params, u32 num_items, u32 tail)
        : num_items(num_items), tail(tail), num_heads(head_blocks(params)) {}

    // Prefetches the item that the CTA's first tile most often is of.
    static __device__ __forceinline__ void prefetch_first(const FolioPrefillParams &params) {
        const FolioWorkItem *item = params.attention.plan.items + blockIdx.x / head_blocks(params);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(item));
        // An item may lie across two cache lines.
        asm volatile("prefetch.global.L2 [%0];" ::"l"(&item->position));
    }

    __device__ __forceinline__ u32 num_tiles() const { return num_items * num_heads; }

    __device__ __forceinline__ Tile tile(const FolioPrefillParams &params, u32 index) const {
        const u32 sectioned = num_items - max(tail, short_ones(params.attention));
        if (index >= sectioned * num_heads) return make_tile(params, index / num_heads, index % num_heads);
        const u32 width = section_width(params.attention);
        const u32 first = index / (sectioned * width) * width, within = index - first * sectioned;
        const u32 heads = min(width, num_heads - first), item = within / heads;
        return make_tile(params, item, first + within - item * heads);
    }

    static __device__ __forceinline__ u32 head_blocks(const FolioPrefillParams &params) {
        return params.attention.num_kv_heads * params.group_blocks;
    }

private:
    // Rounds of tiles that have no sections. On an H200 (481 tokens on 18,955 keys beside 77 short requests, 5.8 rounds): 287 µs
    // instead of 440. Long requests alone take up to 4 % more so.
    static constexpr u32 FEW_ROUNDS = 8;

    // Behind a context the last items are not short, and would read the keys of all heads once more.
    __device__ __forceinline__ u32 short_ones(const FolioAttentionParams &params) const {
        if (params.mask_mode != FOLIO_MASK_CAUSAL) return 0;
        const FolioWorkItem *const items = params.plan.items;
        if (AFTER && num_items > 0 && 2 * items[num_items - 1].kv_end > items->kv_end) return 0;
        return num_items / 4;
    }

    // Head blocks of a section. The first item is one of the longest request; where most have less than half of its keys, there
    // are no sections either.
    __device__ __forceinline__ u32 section_width(const FolioAttentionParams &params) const {
        if (num_tiles() <= FEW_ROUNDS * gridDim.x) return num_heads;
        const FolioWorkItem *const items = params.plan.items;
        const u32 longest = items->kv_end, median = items[num_items / 2].kv_end;
        if (2 * median < longest) return num_heads;
        const float head_bytes = static_cast<float>(longest) * Stored::row_bytes(DIM_QK + DIM_VO);
        const u32 kv_heads = params.num_kv_heads;
        const u32 sections =
            min(static_cast<u32>(head_bytes * kv_heads / static_cast<float>(params.section_bytes)) + 1, kv_heads);
        return (kv_heads + sections - 1) / sections * (num_heads / kv_heads);
    }

    u32 num_items, tail, num_heads;
};

}  // namespace folio::prefill
