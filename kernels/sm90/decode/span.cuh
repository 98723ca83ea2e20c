// The keys that the rows of a decode work item see, as ranges known before its first tile. Which keys of a tile a row sees is
// mask.cuh's.
#pragma once

#include "core/mask_words.cuh"
#include "sm90/decode/work.cuh"

namespace folio::decode {

// Many rows leave no registers for masks; src/cuda/attention/sm90_decode.rs gives such runs to another kernel.
constexpr bool TAKES_MASKS = ROWS <= 16 && !BY_WARPGROUP;

// Whether positions do not say what is seen.
__device__ __forceinline__ bool masked(const FolioAttentionParams &p) {
    return TAKES_MASKS && (p.mask_mode > FOLIO_MASK_FULL || p.num_mm_prefix_ranges > 0);
}

// A mask that goes by request is a window of the request's own.
__device__ __forceinline__ Window<i64> item_window(const FolioAttentionParams &p, const Item &item) {
    return Window<i64>(p, Request{static_cast<i32>(item.work.request), 0, 0});
}

// The keys that any row of the CTA may see, and those that all rows see.
struct RowsSpan {
    KeyRange some, all;

    __device__ __forceinline__ RowsSpan(const FolioPaddedDecodeParams &params, const Item &item) {
        const FolioAttentionParams &p = params.attention;
        const i32 first = item.first_row / params.group_size;
        const i32 last = (item.first_row + item.num_rows - 1) / params.group_size;
        const Window<i64> window = item_window(p, item);
        const RowsKeys visible(window, static_cast<i64>(item.work.position) + first,
                               static_cast<i64>(item.work.position) + last, item_keys(item));
        some = visible.some;
        all = visible.all;
        if (!masked(p)) return;
        const Request request = load_request(p.plan, item.work);
        const i32 row = item.work.q_start;
        some = visible_keys(p, request, item.work, row + first, row + last);
        if (p.mask_mode > FOLIO_MASK_FULL) all.end = min(all.end, visible_prefix_end(p, request));
    }
};

}  // namespace folio::decode
