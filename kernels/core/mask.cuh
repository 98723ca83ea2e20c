// Which keys a query row may see: (base mask AND window) OR mm-prefix, for key indices below kv_len.
// Positions count from the request's first key; row i of qo_len stands at kv_len - qo_len + i, which is
// negative where there are more rows than keys.
#pragma once
#include "core/dtype.cuh"

namespace folio {

// What is the same for all rows of a request.
struct Request {
    i32 index, qo_start, qo_len, kv_len;
};

__device__ __forceinline__ Request load_request(const FolioPlanView &plan, u32 index) {
    const i32 qo_start = plan.qo_indptr[index];
    return {static_cast<i32>(index), qo_start, plan.qo_indptr[index + 1] - qo_start, plan.kv_len[index]};
}

// Keys [begin, end).
struct KeyRange {
    i32 begin, end;
};

// Start and end of an mm-prefix range; unused ones (start >= end) are empty.
__device__ __forceinline__ KeyRange mm_prefix_range(const FolioAttentionParams &p, i32 request, u32 r) {
    const i32 *range = p.mm_prefix_ranges + 2 * (static_cast<i64>(request) * p.num_mm_prefix_ranges + r);
    return range[0] < range[1] ? KeyRange{range[0], range[1] + 1} : KeyRange{0, 0};
}

// The keys below kv_len that mask and window let row `row` see; a custom mask counts as full. Without
// keys, the end is not above the begin.
__device__ __forceinline__ KeyRange row_keys(const FolioAttentionParams &p, const Request &request, i32 row) {
    const i64 position = static_cast<i64>(request.kv_len) - request.qo_len + row;
    i64 begin = 0, end = request.kv_len;
    if (p.mask_mode == FOLIO_MASK_CAUSAL) end = min(end, position + 1);
    if (p.window_left >= 0) begin = max(begin, position - p.window_left);
    if (p.window_right >= 0) end = min(end, position + p.window_right + 1);
    return {static_cast<i32>(min(begin, static_cast<i64>(request.kv_len))), static_cast<i32>(max(end, 0ll))};
}

__device__ __forceinline__ bool in_custom_mask(const FolioAttentionParams &p, const Request &request, i32 row,
                                               i32 key) {
    const i64 element = static_cast<i64>(row) * request.kv_len + key;
    const u8 *mask = p.mask + p.mask_start[request.index];
    if (p.mask_mode == FOLIO_MASK_BYTES) return mask[element] != 0;
    return mask[element >> 3] >> (element & 7) & 1;
}

__device__ __forceinline__ bool in_mm_prefix(const FolioAttentionParams &p, const Request &request, i32 row, i32 key) {
    const i32 position = request.kv_len - request.qo_len + row;
    for (u32 r = 0; r < p.num_mm_prefix_ranges; r++) {
        const KeyRange range = mm_prefix_range(p, request.index, r);
        if (position >= range.begin && position < range.end && key >= range.begin && key < range.end) return true;
    }
    return false;
}

// What one row sees.
struct RowMask {
    i32 row;
    KeyRange keys;

    __device__ __forceinline__ RowMask(const FolioAttentionParams &p, const Request &request, i32 row)
        : row(row), keys(row_keys(p, request, row)) {}

    // Only keys in `tile`, the visible keys of the CTA's rows, may be asked about.
    __device__ __forceinline__ bool sees(const FolioAttentionParams &p, const Request &request, KeyRange tile,
                                         i32 key) const {
        bool seen = key >= keys.begin && key < keys.end && key >= tile.begin && key < tile.end;
        if (seen && p.mask_mode > FOLIO_MASK_FULL) seen = in_custom_mask(p, request, row, key);
        if (!seen && p.num_mm_prefix_ranges > 0 && key >= tile.begin && key < tile.end) {
            seen = in_mm_prefix(p, request, row, key);
        }
        return seen;
    }
};

// The keys of `item` that any row in [first_row, last_row] may see (a custom mask counts as full). Every
// row's keys by mask and window, and every mm-prefix range that holds a row, contain that row's position,
// so the union has no gaps where it matters: nothing outside it may be read.
__device__ __forceinline__ KeyRange visible_keys(const FolioAttentionParams &p, const Request &request,
                                                 const FolioWorkItem &item, i32 first_row, i32 last_row) {
    const i64 first = static_cast<i64>(request.kv_len) - request.qo_len + first_row;
    const i64 last = first + (last_row - first_row);
    i64 begin = row_keys(p, request, first_row).begin, end = row_keys(p, request, last_row).end;
    if (begin >= end) begin = request.kv_len, end = 0;
    for (u32 r = 0; r < p.num_mm_prefix_ranges; r++) {
        const KeyRange range = mm_prefix_range(p, request.index, r);
        if (range.begin <= last && range.end > first && range.begin < range.end) {
            begin = min(begin, static_cast<i64>(range.begin));
            end = max(end, static_cast<i64>(range.end));
        }
    }
    return {static_cast<i32>(max(begin, static_cast<i64>(item.kv_start))),
            static_cast<i32>(min(end, static_cast<i64>(item.kv_end)))};
}

// Every row in [first_row, last_row] sees every key in `keys`, by mask and window alone.
__device__ __forceinline__ bool all_see(const FolioAttentionParams &p, const Request &request, i32 first_row,
                                        i32 last_row, KeyRange keys) {
    if (p.mask_mode > FOLIO_MASK_FULL) return false;
    return keys.begin >= row_keys(p, request, last_row).begin && keys.end <= row_keys(p, request, first_row).end;
}

}  // namespace folio
