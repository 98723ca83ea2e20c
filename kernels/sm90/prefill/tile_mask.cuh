// Which keys the rows of a prefill tile see: those that some see are its steps, and of those that all see no logit is
// looked at. By position only, or by whatever a run may say. Index arithmetic.
#pragma once

#include "core/mask_words.cuh"

namespace folio::prefill {

template <bool MASKED>
struct TileMask;

// By causality, a window and chunks.
template <>
struct TileMask<false> {
    struct {
        u32 index;
    } request;  // whose scales are the tile's

    // The keys of the item that some row sees. Without any, the end is not above the begin.
    __device__ __forceinline__ KeyRange some(const FolioAttentionParams &params, const FolioWorkItem &item) {
        request.index = item.request;
        const Window<i32> window(params);
        return {max(static_cast<i32>(item.kv_start), window.begin(item.position)),
                min(static_cast<i32>(item.kv_end), window.end(item.position + static_cast<int>(item.q_len) - 1))};
    }

    // The keys before `kv_end` that all rows from one position to another see.
    __device__ __forceinline__ KeyRange all(const FolioAttentionParams &params, i32 first_position, i32 last_position,
                                            i32 kv_end) const {
        const Window<i32> window(params);
        return {window.begin(last_position), min(kv_end, window.end(first_position))};
    }
};

// Also by request, by a mask in memory and by ranges that see each other.
template <>
struct TileMask<true> {
    Request request;
    KeyRange keys;  // of the item that some row may see

    // A mask in memory counts as full, and a range counts whole. The lane that asks has few registers: less exact than
    // mask.cuh's visible_keys, which is slower by them.
    __device__ __forceinline__ KeyRange some(const FolioAttentionParams &params, const FolioWorkItem &item) {
        const KeyRange all = {static_cast<i32>(item.kv_start), static_cast<i32>(item.kv_end)};
        const i32 first = item.position, last = first + static_cast<i32>(item.q_len) - 1;
        request = load_request(params.plan, item);
        keys = RowsKeys(Window<i32>(params, request), first, last, all).some;
#pragma unroll 1
        for (u32 r = 0; r < params.num_mm_prefix_ranges; r++) {
            const KeyRange range = mm_prefix_range(params, request.index, r);
            if (range.begin <= last && range.end > first) {
                keys.begin = max(min(keys.begin, range.begin), all.begin);
                keys.end = min(max(keys.end, range.end), all.end);
            }
        }
        return keys;
    }

    __device__ __forceinline__ KeyRange all(const FolioAttentionParams &params, i32 first_position, i32 last_position,
                                            i32) const {
        const Window<i32> window(params, request);
        const KeyRange seen = RowsKeys(window, first_position, last_position, keys).all;
        const bool custom = params.mask_mode > FOLIO_MASK_FULL;
        return {seen.begin, custom ? min(seen.end, visible_prefix_end(params, request)) : seen.end};
    }
};

}  // namespace folio::prefill
