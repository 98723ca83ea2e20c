// Which keys a query row sees: (base mask AND window) OR mm-prefix, or for runs that say so (base mask OR mm-prefix) AND
// window, for key indices below kv_len. Chunks of local attention are part of the window. The rule stands here once, for all kernels; how scores of hidden keys are overwritten in registers is each kernel's own.
// Positions count from the request's first key. They are negative where there are more rows than keys.
#pragma once
#include "core/dtype.cuh"

namespace folio {

// What is the same for all rows of a request. `past` is the position of its first row.
struct Request {
    i32 index, kv_len, past;
};

__device__ __forceinline__ Request load_request(const FolioPlanView &plan, const FolioWorkItem &item) {
    return {static_cast<i32>(item.request), plan.kv_len[item.request], item.position - static_cast<i32>(item.q_start)};
}

// How many of the rows [token, token + num_rows) q, o and lse have; a batch on the device may count more.
__device__ __forceinline__ u32 existing_rows(const FolioAttentionParams &p, u32 token, u32 num_rows) {
    return token < p.num_tokens ? min(num_rows, p.num_tokens - token) : 0;
}

// Keys [begin, end).
struct KeyRange {
    i32 begin, end;

    __device__ __forceinline__ bool holds(i32 key) const { return key >= begin && key < end; }
};

// How far a row sees around its own position by base mask and window: keys [position - left, position + right]. A
// custom mask counts as full. Index is i64, or i32 where the host lets no position exceed 2^29.
template <class Index>
struct Window {
    static constexpr Index UNLIMITED = static_cast<Index>(1) << (sizeof(Index) == 4 ? 30 : 40);
    Index left, right;
    u32 chunk_size, chunk_look_back;

    // A mask that goes by request counts as full.
    __device__ __forceinline__ explicit Window(const FolioAttentionParams &p)
        : chunk_size(p.chunk_size), chunk_look_back(p.chunk_look_back) {
        left = p.window_left < 0 ? UNLIMITED : min(static_cast<Index>(p.window_left), UNLIMITED);
        right = p.window_right < 0 ? UNLIMITED : min(static_cast<Index>(p.window_right), UNLIMITED);
        if (p.mask_mode == FOLIO_MASK_CAUSAL) right = min(right, static_cast<Index>(0));
    }

    __device__ __forceinline__ Window(const FolioAttentionParams &p, const Request &request) : Window(p) {
        if (p.causal_requests && p.causal_requests[request.index]) right = min(right, static_cast<Index>(0));
    }

    __device__ __forceinline__ Index begin(Index position) const {
        const Index first = position - left;
        return chunk_size ? max(first, chunk_begin(position)) : first;
    }
    __device__ __forceinline__ Index end(Index position) const { return position + right + 1; }

    // Of the keys in `range`, those that the row at `position` sees. Without any, the end is not above the begin.
    __device__ __forceinline__ KeyRange keys(Index position, KeyRange range) const {
        const Index first = range.begin, last = range.end;
        return {static_cast<i32>(min(max(begin(position), first), last)),
                static_cast<i32>(max(min(end(position), last), first))};
    }

private:
    // Positions are below 2^32. Rows before the first key see none.
    __device__ __forceinline__ Index chunk_begin(Index position) const {
        const u32 own = static_cast<u32>(max(position, static_cast<Index>(0))) / chunk_size;
        return static_cast<Index>(own > chunk_look_back ? (own - chunk_look_back) * chunk_size : 0);
    }
};

// Of the keys in a range, those that some of consecutive rows see and those that all of them see: later rows see no
// less at the end and no more at the beginning.
struct RowsKeys {
    KeyRange some, all;

    template <class Index>
    __device__ __forceinline__ RowsKeys(const Window<Index> &window, Index first_position, Index last_position,
                                        KeyRange range) {
        const KeyRange first = window.keys(first_position, range), last = window.keys(last_position, range);
        some = {first.begin, last.end};
        all = {last.begin, first.end};
    }
};

// Start and end of an mm-prefix range; unused ones (start >= end) are empty.
__device__ __forceinline__ KeyRange mm_prefix_range(const FolioAttentionParams &p, i32 request, u32 r) {
    const i32 *range = p.mm_prefix_ranges + 2 * (static_cast<i64>(request) * p.num_mm_prefix_ranges + r);
    return range[0] < range[1] ? KeyRange{range[0], range[1] + 1} : KeyRange{0, 0};
}

// Position of a request's row.
__device__ __forceinline__ i64 position_of(const Request &request, i32 row) {
    return static_cast<i64>(request.past) + row;
}

// What rows [first_row, last_row] of a request see by base mask and window.
__device__ __forceinline__ RowsKeys rows_keys(const FolioAttentionParams &p, const Request &request, i32 first_row,
                                              i32 last_row) {
    return RowsKeys(Window<i64>(p, request), position_of(request, first_row), position_of(request, last_row),
                    {0, request.kv_len});
}

// Keys that a custom mask leaves to all rows without having elements for them.
__device__ __forceinline__ i32 visible_prefix(const FolioAttentionParams &p, const Request &request) {
    return p.flags & (FOLIO_RUN_MASK_SKIP_PREFIX | FOLIO_RUN_MASK_NEW_KEYS) ? request.past : 0;
}

__device__ __forceinline__ bool in_visible_prefix(const FolioAttentionParams &p, const Request &request, i32 key) {
    return key < visible_prefix(p, request);
}

__device__ __forceinline__ bool in_custom_mask(const FolioAttentionParams &p, const Request &request, i32 row,
                                               i32 key) {
    if (in_visible_prefix(p, request, key)) return true;
    const bool new_keys = p.flags & FOLIO_RUN_MASK_NEW_KEYS;
    const i64 columns = new_keys ? static_cast<i64>(request.kv_len) - request.past : request.kv_len;
    const i64 element = row * columns + key - (new_keys ? request.past : 0);
    const bool bytes = p.mask_mode == FOLIO_MASK_BYTES;
    const i64 at = p.mask_start[request.index] + (bytes ? element : element >> 3);
    if (at < 0 || at >= p.mask_bytes) return false;
    return bytes ? p.mask[at] != 0 : p.mask[at] >> (element & 7) & 1;
}

// The keys around a position by the window, whatever the base mask says.
__device__ __forceinline__ KeyRange around(const FolioAttentionParams &p, i64 position) {
    Window<i64> window(p);
    window.right = p.window_right < 0 ? Window<i64>::UNLIMITED : p.window_right;
    return window.keys(position, {0, 0x7fffffff});
}

__device__ __forceinline__ bool in_mm_prefix(const FolioAttentionParams &p, const Request &request, i32 row, i32 key) {
    const i32 position = static_cast<i32>(position_of(request, row));
    if (p.flags & FOLIO_RUN_MM_PREFIX_IN_WINDOW && !around(p, position).holds(key)) return false;
    for (u32 r = 0; r < p.num_mm_prefix_ranges; r++) {
        const KeyRange range = mm_prefix_range(p, request.index, r);
        if (range.holds(position) && range.holds(key)) return true;
    }
    return false;
}

// What one row sees.
struct RowMask {
    i32 row;
    KeyRange keys;

    __device__ __forceinline__ RowMask(const FolioAttentionParams &p, const Request &request, i32 row)
        : row(row), keys(Window<i64>(p, request).keys(position_of(request, row), {0, request.kv_len})) {}

    __device__ __forceinline__ RowMask(i32 row, KeyRange keys) : row(row), keys(keys) {}

    // Only keys in `tile`, the visible keys of the CTA's rows, may be asked about.
    __device__ __forceinline__ bool sees(const FolioAttentionParams &p, const Request &request, KeyRange tile,
                                         i32 key) const {
        bool seen = keys.holds(key) && tile.holds(key);
        if (seen && p.mask_mode > FOLIO_MASK_FULL) seen = in_custom_mask(p, request, row, key);
        if (!seen && p.num_mm_prefix_ranges > 0 && tile.holds(key)) seen = in_mm_prefix(p, request, row, key);
        return seen;
    }
};

// The keys of `item` that any row in [first_row, last_row] may see (a custom mask counts as full). Every
// row's keys by mask and window, and every mm-prefix range that holds a row, contain that row's position,
// so the union has no gaps where it matters: nothing outside it may be read.
__device__ __forceinline__ KeyRange visible_keys(const FolioAttentionParams &p, const Request &request,
                                                 const FolioWorkItem &item, i32 first_row, i32 last_row) {
    const i64 first = position_of(request, first_row), last = position_of(request, last_row);
    const KeyRange by_window = rows_keys(p, request, first_row, last_row).some;
    i64 begin = by_window.begin, end = by_window.end;
    if (begin >= end) begin = request.kv_len, end = 0;
    for (u32 r = 0; r < p.num_mm_prefix_ranges; r++) {
        const KeyRange range = mm_prefix_range(p, request.index, r);
        if (range.begin <= last && range.end > first && range.begin < range.end) {
            begin = min(begin, static_cast<i64>(range.begin));
            end = max(end, static_cast<i64>(range.end));
        }
    }
    if (p.flags & FOLIO_RUN_MM_PREFIX_IN_WINDOW) {
        begin = max(begin, static_cast<i64>(around(p, first).begin));
        end = min(end, static_cast<i64>(around(p, last).end));
    }
    return {static_cast<i32>(max(begin, static_cast<i64>(item.kv_start))),
            static_cast<i32>(min(end, static_cast<i64>(item.kv_end)))};
}

// Every row in [first_row, last_row] sees every key in `keys`, by mask and window alone.
__device__ __forceinline__ bool all_see(const FolioAttentionParams &p, const Request &request, i32 first_row,
                                        i32 last_row, KeyRange keys) {
    if (p.mask_mode > FOLIO_MASK_FULL && !in_visible_prefix(p, request, keys.end - 1)) return false;
    const KeyRange all = rows_keys(p, request, first_row, last_row).all;
    return keys.begin >= all.begin && keys.end <= all.end;
}

}  // namespace folio
