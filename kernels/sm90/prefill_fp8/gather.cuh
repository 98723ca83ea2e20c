// Rows of K or of V in e4m3 that a warp copies to shared memory one by one, where boxes do not describe the cache: pages of
// any size and at any distance, ragged rows. What lies where in shared memory is as boxes would write it.
//
// A lane finds rows, 32 apart, and copies 16 bytes at a time of whichever. Where rows are is counted in pieces of 16 bytes
// from the first, in 32 bits: registers are short.
#pragma once

#include "core/paged.cuh"
#include "ptx/ptx.cuh"
#include "sm90/prefill_fp8/tile.cuh"

namespace folio::prefill_fp8 {

// Rows `first` to `first + ROWS` of every block, from the last block of a tile down.
template <u32 ROWS>
class RowCursor {
public:
    __device__ __forceinline__ RowCursor(const FolioPrefillFp8Params &params, const Tile &tile, u32 first)
        : params(params), tile(tile), key(tile.first_block * BLOCK + first + lane()) {
        find();
    }

    // Asks for the copies of the rows of a block, whose page ids were asked for before, and then for the ids of the block
    // before it, unless it is the tile's last.
    __device__ __forceinline__ void copy(const FolioCache &cache, const FolioPieces &pieces, u32 target, bool is_last) {
        const u32 piece = lane() % ROW_PIECES, row = lane() / ROW_PIECES, column = piece % (ROW / 16);
        const bool is_column = piece * 16 < pieces.head_dim;
        const u32 to = target + piece / (ROW / 16) * KEY_PART + row * ROW + ((column ^ first_piece(row)) << 4);
        if constexpr (BY_TABLE) tabulate(pieces);
#pragma unroll
        for (u32 n = 0; n < OF_LANE; ++n) {
            const u32 at = BY_TABLE ? 0 : place(n, pieces), first_lane = kept(row);
#pragma unroll
            for (u32 first = 32 * n; first < min(32 * n + 32, ROWS); first += AT_ONCE) {
                const u32 from = BY_TABLE ? table()[first + row] : __shfl_sync(FULL_WARP, at, first % 32 + first_lane);
                cp_async_or_zeros((to ^ first_piece(first) << 4) + first * ROW,
                                  static_cast<const u8 *>(cache.data) + 16ull * (from + piece),
                                  is_column && from != NOWHERE);
            }
        }
        cp_async_commit();
        key -= BLOCK;
        if (!is_last) find();
    }

private:
    static constexpr u32 ROW_PIECES = DIM / 16, AT_ONCE = 32 / ROW_PIECES, OF_LANE = (ROWS + 31) / 32;
    static constexpr u32 NOWHERE = 0xffffffffu;
    // The warp that has all rows of a block passes on where they are through shared memory: lanes' numbers for so many
    // shuffles are more registers than it has.
    static constexpr bool BY_TABLE = ROWS == BLOCK;
    static_assert(ROWS % AT_ONCE == 0 && (!BY_TABLE || ROWS % 32 == 0));

    static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }

    // Of the lane's row of this number, in pieces.
    __device__ __forceinline__ u32 place(u32 n, const FolioPieces &pieces) const {
        const u32 row = key + 32 * n, token = row - divide(row, params.page_size) * params.page_size.divisor;
        const bool exists = static_cast<u32>(id[n]) < params.attention.num_pages;
        return exists ? id[n] * pieces.page + token * pieces.token + tile.kv_head * pieces.head : NOWHERE;
    }

    static __device__ __forceinline__ volatile u32 *table() {
        extern __shared__ __align__(1024) u8 shared_bytes[];
        return reinterpret_cast<volatile u32 *>(shared_bytes + ROW_PLACES);
    }

    __device__ __forceinline__ void tabulate(const FolioPieces &pieces) const {
#pragma unroll
        for (u32 n = 0; n < OF_LANE; ++n) table()[32 * n + lane()] = place(n, pieces);
        __syncwarp();
    }

    // Rows past the last key are nowhere. Ragged rows are pages in order.
    __device__ __forceinline__ void find() {
        const i32 *const ids = params.attention.plan.page_ids;
#pragma unroll
        for (u32 n = 0; n < OF_LANE; ++n) {
            const u32 row = key + 32 * n;
            const bool exists = 32 * n + lane() < ROWS && static_cast<int>(row) < tile.kv_end;
            const i64 entry = tile.source + divide(row, params.page_size);
            id[n] = !exists ? -1 : ids ? ids[entry] : static_cast<i32>(entry);
        }
    }

    const FolioPrefillFp8Params &params;
    const Tile &tile;  // in shared memory
    u32 key;           // the lane's first of the block
    i32 id[OF_LANE];
};

}  // namespace folio::prefill_fp8
