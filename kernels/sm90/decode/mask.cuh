// Which keys of a tile the decode kernel's rows see. By positions that is a range, known before the item's first tile; a
// mask in memory and ranges of keys are looked at tile by tile, and only where they may hide something.
#pragma once

#include "sm90/decode/rings.cuh"

namespace folio::decode {

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
