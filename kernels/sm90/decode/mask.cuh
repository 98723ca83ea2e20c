// Which keys of a tile the decode kernel's rows see. By positions that is a range, known before the item's first tile; a
// mask in memory and ranges of keys are looked at tile by tile, and only where they may hide something.
#pragma once

#include "core/mask_words.cuh"
#include "sm90/decode/work.cuh"

namespace folio::decode {

// Many rows leave no registers for masks; src/cuda/attention/sm90_decode.rs gives such runs to another kernel.
constexpr bool TAKES_MASKS = ROWS <= 16;

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

// The keys that any row of the CTA sees, and those that all rows see.
struct TileSpan {
    KeySpan keys;
    KeyRange inner;
    i32 tiles;  // of this key group

    __device__ __forceinline__ TileSpan(const FolioPaddedDecodeParams &params, const Item &item, u32 key_group) {
        const RowsSpan seen(params, item);
        inner = seen.all;
        keys.begin = seen.some.begin;
        keys.end = seen.some.end;
        keys.page_ids = params.attention.plan.page_ids + item.work.page_start;
        keys.first = keys.begin / TILE_TOKENS * TILE_TOKENS;
        keys.head = item.kv_head;
        const i32 all = keys.end <= keys.begin ? 0 : (keys.end - keys.first + TILE_TOKENS - 1) / TILE_TOKENS;
        tiles = max(0, all - static_cast<i32>(key_group) + KEY_GROUPS - 1) / KEY_GROUPS;
    }
};

// The row that a lane looks at for all lanes: row `lane` of the warp's part of the item.
struct OwnRow {
    i32 row;
    WordMask mask;

    // `some` are the keys that any row of the CTA may see.
    __device__ __forceinline__ OwnRow(const FolioPaddedDecodeParams &params, const Item &item, KeyRange some, u32 lane)
        : row(static_cast<i32>(item.work.q_start + packed_row(params, item, lane).query)),
          mask(WordMask::of_row<i64>(params.attention, request(params.attention, item), some, row)) {}

    // The keys from `token` on that it sees, as bits.
    __device__ __forceinline__ u32 seen(const FolioAttentionParams &p, const Item &item, KeyRange some,
                                        i32 token) const {
        return masked(p) ? mask.seen(p, request(p, item), some, row, token) : word_of(mask.keys, token);
    }

private:
    // The number of its keys matters to masks only.
    static __device__ __forceinline__ Request request(const FolioAttentionParams &p, const Item &item) {
        const i32 kv_len = masked(p) ? p.plan.kv_len[item.work.request] : 0;
        return {static_cast<i32>(item.work.request), kv_len, item.work.position - static_cast<i32>(item.work.q_start)};
    }
};

// The keys of a tile that a lane's rows see, as bits from its first token on.
struct SeenKeys {
    static_assert(8 * ROW_TILES <= 32 && TILE_TOKENS <= 32, "a lane for a row, a bit for a key");
    u32 words[ROW_TILES][2];

    // From the words of all lanes' own rows.
    __device__ __forceinline__ void gather(u32 own, u32 lane) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
            for (int j = 0; j < 2; ++j) words[t][j] = __shfl_sync(FULL_WARP, own, 8 * t + 2 * (lane & 3) + j);
        }
    }
};

}  // namespace folio::decode
