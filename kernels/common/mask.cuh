// Which keys a query row may see: (base mask AND window) OR mm-prefix, for key indices below kv_len.
// Positions count from the request's first key; row i of qo_len stands at kv_len - qo_len + i, which is
// negative where there are more rows than keys.
#pragma once
#include "common/dtype.cuh"

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

__device__ __forceinline__ bool in_window(const FolioAttentionParams &p, i32 position, i32 key) {
    const bool left = p.window_left < 0 || position - key <= p.window_left;
    const bool right = p.window_right < 0 || key - position <= p.window_right;
    return left && right;
}

__device__ __forceinline__ bool in_base(const FolioAttentionParams &p, const Request &request, i32 row, i32 key) {
    if (p.mask_mode == FOLIO_MASK_CAUSAL) return key <= request.kv_len - request.qo_len + row;
    if (p.mask_mode == FOLIO_MASK_FULL) return true;
    const i64 element = static_cast<i64>(row) * request.kv_len + key;
    const u8 *mask = p.mask + p.mask_start[request.index];
    if (p.mask_mode == FOLIO_MASK_BYTES) return mask[element] != 0;
    return mask[element >> 3] >> (element & 7) & 1;
}

// Row `row` of the request sees key `key`. Only keys below kv_len may be asked about.
__device__ __forceinline__ bool sees(const FolioAttentionParams &p, const Request &request, i32 row, i32 key) {
    const i32 position = request.kv_len - request.qo_len + row;
    if (in_window(p, position, key) && in_base(p, request, row, key)) return true;
    for (u32 r = 0; r < p.num_mm_prefix_ranges; r++) {
        const KeyRange range = mm_prefix_range(p, request.index, r);
        if (position >= range.begin && position < range.end && key >= range.begin && key < range.end) return true;
    }
    return false;
}

// The keys of `item` that any row in [first_row, last_row] may see (a custom mask counts as full). Every
// row's keys by mask and window, and every mm-prefix range that holds a row, contain that row's position,
// so the union has no gaps where it matters: nothing outside it may be read.
__device__ __forceinline__ KeyRange visible_keys(const FolioAttentionParams &p, const Request &request,
                                                 const FolioWorkItem &item, i32 first_row, i32 last_row) {
    const i64 first = static_cast<i64>(request.kv_len) - request.qo_len + first_row;
    const i64 last = first + (last_row - first_row);
    i64 begin = 0, end = request.kv_len;
    if (p.mask_mode == FOLIO_MASK_CAUSAL) end = min(end, last + 1);
    if (p.window_left >= 0) begin = max(begin, first - p.window_left);
    if (p.window_right >= 0) end = min(end, last + p.window_right + 1);
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
    const i32 past = request.kv_len - request.qo_len;
    const bool causal = p.mask_mode == FOLIO_MASK_FULL || keys.end - 1 <= past + first_row;
    const bool left = p.window_left < 0 || past + last_row - keys.begin <= p.window_left;
    const bool right = p.window_right < 0 || keys.end - 1 - (past + first_row) <= p.window_right;
    return causal && left && right;
}

}  // namespace folio
