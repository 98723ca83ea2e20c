// Rows of K or of V in e4m3 that a warp copies to shared memory one by one, where boxes do not describe the cache: pages of
// any size and at any distance, ragged rows. What lies where in shared memory is as boxes would write it.
//
// A lane finds rows, 32 apart, and copies 16 bytes at a time of whichever. Where rows are is counted in pieces of 16 bytes
// from the first, in 32 bits: registers are short.
#pragma once

#include "core/paged.cuh"
#include "ptx/ptx.cuh"
#include "ptx/shared.cuh"
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

    // Where the rows of a block are, whose page ids were asked for before. `copy` comes next.
    __device__ __forceinline__ void locate(const FolioPieces &pieces) const {
        if constexpr (!BY_TABLE) return;
        __syncwarp();
#pragma unroll
        for (u32 n = 0; n < OF_LANE; ++n) table_entry(lane())[32 * n / AT_ONCE] = place(n, pieces);
        __syncwarp();
    }

    // Asks for the copies of these rows, and then for the page ids of the block before, unless this is the tile's last.
    __device__ __forceinline__ void copy(const FolioCache &cache, const FolioPieces &pieces, u32 target, bool is_last) {
        const u32 piece = lane() % ROW_PIECES, row = lane() / ROW_PIECES, column = piece % (ROW / 16);
        const bool is_column = piece * 16 < pieces.head_dim;
        const u32 to = target + piece / (ROW / 16) * KEY_PART + row * ROW + ((column ^ first_piece(row)) << 4);
#pragma unroll
        for (u32 first = 0; first < ROWS; first += TOGETHER * AT_ONCE) {
            u32 from[TOGETHER];
            find_places(from, first, row, pieces);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                const u32 at = first + i * AT_ONCE;
                cp_async_or_zeros((to ^ first_piece(at) << 4) + at * ROW,
                                  static_cast<const u8 *>(cache.data) + 16ull * (from[i] + piece),
                                  is_column && from[i] != NOWHERE);
            }
        }
        key -= BLOCK;
        if (!is_last) find();
    }

private:
    static constexpr u32 ROW_PIECES = DIM / 16, AT_ONCE = 32 / ROW_PIECES, OF_LANE = (ROWS + 31) / 32;
    static constexpr u32 NOWHERE = 0xffffffffu;
    // Rows whose places are looked up at a time. A look-up takes longer than a copy.
    static constexpr u32 TOGETHER = 4;
    // The warp that has all rows of a block passes on where they are through shared memory: lanes' numbers for so many
    // shuffles are more registers than it has.
    static constexpr bool BY_TABLE = ROWS == BLOCK;
    static_assert(ROWS % (TOGETHER * AT_ONCE) == 0 && (!BY_TABLE || ROWS % 32 == 0));

    static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }

    // Of the lane's row of this number, in pieces.
    __device__ __forceinline__ u32 place(u32 n, const FolioPieces &pieces) const {
        const u32 row = key + 32 * n, token = row - divide(row, params.page_size) * params.page_size.divisor;
        const bool exists = static_cast<u32>(id[n]) < params.attention.num_pages;
        return exists ? id[n] * pieces.page + token * pieces.token + tile.kv_head * pieces.head : NOWHERE;
    }

    // Of row `first + row` and the next ones, AT_ONCE apart.
    __device__ __forceinline__ void find_places(u32 (&places)[TOGETHER], u32 first, u32 row,
                                                const FolioPieces &pieces) const {
        if constexpr (BY_TABLE) {
            const uint4 read = ld_shared_v4(shared_address(table_entry(row) + first / AT_ONCE));
            places[0] = read.x, places[1] = read.y, places[2] = read.z, places[3] = read.w;
        } else {
            const u32 at = place(first / 32, pieces);
#pragma unroll
            for (u32 i = 0; i < TOGETHER; ++i) {
                places[i] = __shfl_sync(FULL_WARP, at, first % 32 + i * AT_ONCE + kept(row));
            }
        }
    }

    // Where a row's place is. Those of rows AT_ONCE apart are neighbours: one read is for TOGETHER of them.
    static __device__ __forceinline__ u32 *table_entry(u32 row) {
        extern __shared__ __align__(1024) u8 shared_bytes[];
        return reinterpret_cast<u32 *>(shared_bytes + ROW_PLACES) + row % AT_ONCE * (ROWS / AT_ONCE) + row / AT_ONCE;
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
