// mask.cuh's rule, RowMask::sees, for 32 consecutive keys of a row at a time: the keys that it sees are the bits of a
// word. Masks in memory are read by words wherever they start. What becomes of the bits is each kernel's own.
#pragma once
#include "core/mask.cuh"

namespace folio {

// The first `n` bits; all of them from 32 on.
__device__ __forceinline__ u32 first_bits(i32 n) {
    u32 bits;
    asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(bits) : "r"(max(n, 0)));
    return bits;
}

// Of the keys from `key` on, those in `range`. None where it ends before it begins.
__device__ __forceinline__ u32 word_of(KeyRange range, i32 key) {
    return first_bits(range.end - key) & ~first_bits(range.begin - key);
}

// A bit for each byte that is not 0.
__device__ __forceinline__ u32 bytes_that_are_set(u32 bytes) {
    const u32 set = ((bytes & 0x7f7f7f7f) + 0x7f7f7f7f | bytes) >> 7 & 0x01010101;
    return set * 0x01020408 >> 24;
}

// Keys before the returned one are left to all rows by a custom mask.
__device__ __forceinline__ i32 visible_prefix_end(const FolioAttentionParams &p, const Request &request) {
    return in_visible_prefix(p, request, request.past - 1) ? request.past : 0;
}

// A custom mask's word. Beyond the request's keys its bits mean nothing.
__device__ __forceinline__ u32 custom_mask_word(const FolioAttentionParams &p, const Request &request, i32 row,
                                                i32 key) {
    const bool new_keys = p.flags & FOLIO_RUN_MASK_NEW_KEYS, bytes = p.mask_mode == FOLIO_MASK_BYTES;
    const i64 columns = new_keys ? static_cast<i64>(request.kv_len) - request.past : request.kv_len;
    const i64 element = row * columns + key - (new_keys ? request.past : 0);
    // From the aligned word that holds the first element on: two words have 32 bits, nine have 32 bytes.
    const i64 byte = p.mask_start[request.index] + (bytes ? element : element >> 3);
    const u32 beyond = static_cast<u32>(reinterpret_cast<u64>(p.mask) + byte) & 3;
    const i64 first = byte - beyond;
    u32 seen = 0;
    if (first < 0 || first + (bytes ? 36 : 8) > p.mask_bytes) {
        // At the ends of the mask, key by key.
#pragma unroll 1
        for (i32 i = 0; i < 32; ++i) seen |= static_cast<u32>(in_custom_mask(p, request, row, key + i)) << i;
        return seen;
    }
    const u32 *words = reinterpret_cast<const u32 *>(p.mask + first);
    if (bytes) {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
            seen |= bytes_that_are_set(__funnelshift_r(words[i], words[i + 1], 8 * beyond)) << 4 * i;
        }
    } else {
        seen = __funnelshift_r(words[0], words[1], 8 * beyond + (element & 7));
    }
    return seen | word_of({0, visible_prefix_end(p, request)}, key);
}

__device__ __forceinline__ u32 mm_prefix_word(const FolioAttentionParams &p, const Request &request, i32 row, i32 key) {
    const i32 position = static_cast<i32>(position_of(request, row));
    u32 seen = 0;
#pragma unroll 1
    for (u32 r = 0; r < p.num_mm_prefix_ranges; r++) {
        const KeyRange range = mm_prefix_range(p, request.index, r);
        if (range.holds(position)) seen |= word_of(range, key);
    }
    return p.flags & FOLIO_RUN_MM_PREFIX_IN_WINDOW ? seen & word_of(around(p, position), key) : seen;
}

// The keys from `key` on that a row sees, of those in `tile`. Index is that of Window.
template <class Index>
__device__ __forceinline__ u32 seen_word(const FolioAttentionParams &p, const Request &request, KeyRange tile, i32 row,
                                         i32 key) {
    const Window<Index> window(p, request);
    u32 seen = word_of(window.keys(static_cast<Index>(position_of(request, row)), tile), key);
    if (p.mask_mode > FOLIO_MASK_FULL && seen) seen &= custom_mask_word(p, request, row, key);
    if (p.num_mm_prefix_ranges > 0) seen |= mm_prefix_word(p, request, row, key) & word_of(tile, key);
    return seen;
}

}  // namespace folio
