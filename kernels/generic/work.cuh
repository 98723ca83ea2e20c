// What one CTA of the generic kernels computes: a KV head of a row tile of a work item. Index arithmetic only.
#pragma once
#include "generic/output_row.cuh"

namespace folio {

struct Work {
    const FolioWorkItem *item;  // read where it is needed: registers are scarce
    Request request;
    u32 group, kv_head, first_row, num_rows;  // rows of the item, all heads of the group counted

    // Head fastest, then the item's row tiles. False where there is nothing to do.
    __device__ __forceinline__ bool load(const FolioGenericParams &g, u32 block, u32 rows_per_tile) {
        const FolioAttentionParams &p = g.attention;
        group = p.num_qo_heads / p.num_kv_heads;
        const u32 index = block / p.num_kv_heads / g.row_tiles;
        if (index >= p.plan.counts[FOLIO_COUNT_ITEMS]) return false;
        item = p.plan.items + index;
        request = load_request(p.plan, *item);
        kv_head = block % p.num_kv_heads;
        first_row = block / p.num_kv_heads % g.row_tiles * rows_per_tile;
        num_rows = existing_rows(p, item->q_token, item->q_len) * group;
        return first_row < num_rows;
    }

    // The tile row's place among the item's rows; rows past the end repeat the last.
    __device__ __forceinline__ u32 row(u32 tile_row) const { return min(first_row + tile_row, num_rows - 1); }

    // The tile row's token within the request.
    __device__ __forceinline__ i32 token(u32 tile_row) const { return item->q_start + row(tile_row) / group; }

    __device__ __forceinline__ u32 qo_head(u32 tile_row) const { return kv_head * group + row(tile_row) % group; }
};

}  // namespace folio
