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

// Where a row's elements of a custom mask lie: the place of key 0, in bits or bytes from the aligned word on that the mask
// begins in.
struct MaskRow {
    i64 first;

    __device__ __forceinline__ MaskRow(const FolioAttentionParams &p, const Request &request, i32 row) {
        const bool new_keys = p.flags & FOLIO_RUN_MASK_NEW_KEYS, bytes = p.mask_mode == FOLIO_MASK_BYTES;
        const i64 columns = new_keys ? static_cast<i64>(request.kv_len) - request.past : request.kv_len;
        const i64 start = p.mask_start[request.index] + bytes_before(p);
        first = (bytes ? start : 8 * start) + row * columns - (new_keys ? request.past : 0);
    }

    explicit __device__ __forceinline__ MaskRow(i64 first) : first(first) {}

    // The word of the keys from `key` on, into `seen`; beyond the request's keys its bits mean nothing. False where not
    // all of what would be read is the mask's.
    __device__ __forceinline__ bool load(const FolioAttentionParams &p, i32 key, u32 &seen) const {
        // Two words have 32 bits, nine have 32 bytes.
        const bool bytes = p.mask_mode == FOLIO_MASK_BYTES;
        const i64 place = first + key, word = bytes ? place >> 2 : place >> 5;
        const i64 words = p.mask_bytes + bytes_before(p) >> 2;
        if (word < (bytes_before(p) ? 1 : 0) || word + (bytes ? 9 : 2) > words) return false;
        const u32 *from = reinterpret_cast<const u32 *>(p.mask - bytes_before(p)) + word;
        if (!bytes) {
            seen = __funnelshift_r(from[0], from[1], place);
            return true;
        }
        seen = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            seen |= bytes_that_are_set(__funnelshift_r(from[i], from[i + 1], 8 * place)) << 4 * i;
        }
        return true;
    }

private:
    static __device__ __forceinline__ u32 bytes_before(const FolioAttentionParams &p) {
        return reinterpret_cast<u64>(p.mask) & 3;
    }
};

// The word of a row whose elements lie at `place`. Beyond the request's keys its bits mean nothing.
__device__ __forceinline__ u32 custom_mask_word(const FolioAttentionParams &p, const Request &request,
                                                const MaskRow &place, i32 row, i32 key) {
    u32 seen = 0;
    if (place.load(p, key, seen)) return seen | word_of({0, visible_prefix_end(p, request)}, key);
    // At the ends of the mask, key by key.
#pragma unroll 1
    for (i32 i = 0; i < 32; ++i) seen |= static_cast<u32>(in_custom_mask(p, request, row, key + i)) << i;
    return seen;
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

// What one row sees, by words: RowMask's rule. Of no use to others than the row's request.
struct WordMask {
    MaskRow place;  // only of a custom mask
    KeyRange keys;  // by position

    // `tile` are the keys that some row of the CTA may see. Index is that of Window.
    template <class Index>
    static __device__ __forceinline__ WordMask of_row(const FolioAttentionParams &p, const Request &request,
                                                      KeyRange tile, i32 row) {
        const bool custom = p.mask_mode > FOLIO_MASK_FULL;
        const Index position = static_cast<Index>(position_of(request, row));
        return {custom ? MaskRow(p, request, row) : MaskRow(0), Window<Index>(p, request).keys(position, tile)};
    }

    // The keys from `key` on that the row sees.
    __device__ __forceinline__ u32 seen(const FolioAttentionParams &p, const Request &request, KeyRange tile, i32 row,
                                        i32 key) const {
        u32 seen = word_of(keys, key);
        if (p.mask_mode > FOLIO_MASK_FULL && seen) seen &= custom_mask_word(p, request, place, row, key);
        if (p.num_mm_prefix_ranges > 0) seen |= mm_prefix_word(p, request, row, key) & word_of(tile, key);
        return seen;
    }
};

}  // namespace folio
