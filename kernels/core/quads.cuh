// Rows of int32 or int64 that a launch writes by four elements of a thread, in stores of 16 bytes.
#pragma once
#include "core/integers.cuh"

namespace folio {

constexpr u32 QUAD = 4, TILE = QUAD * LANES;  // elements of a thread, and of a warp

// One row of a table, in tiles that begin at the alignment of its memory: the first may begin before the row.
struct TiledRow {
    const FolioIntegers &table;
    i64 row, count;
    u32 skew;

    // The first `count` elements of the row.
    __device__ __forceinline__ TiledRow(const FolioIntegers &table, i64 row, i64 count)
        : table(table), row(row), count(count) {
        const u64 first = reinterpret_cast<u64>(table.data) + row * table.stride * table.bytes;
        skew = static_cast<u32>(first / table.bytes) % QUAD;
    }

    __device__ __forceinline__ i64 tiles() const { return (count + skew + TILE - 1) / TILE; }

    // Writes a tile by a warp. `ids` gives elements in rising order: ids.reach(from, to) is the end of those from `from`
    // on that ids[at] then has, at most `to`; they fit the table.
    template <class Ids>
    __device__ __forceinline__ void put(i64 tile, Ids &ids) const {
        const i64 first = tile * TILE + QUAD * (threadIdx.x % LANES) - skew, end = min(first + QUAD, count);
        i64 quad[QUAD];
#pragma unroll 1
        for (i64 from = max(first, 0ll), to; from < end; from = to) {
            to = ids.reach(from, end);
#pragma unroll
            for (u32 i = 0; i < QUAD; i++) {
                if (first + i >= from && first + i < to) quad[i] = ids[first + i];
            }
        }
        if (first >= 0 && first + QUAD <= count) {
            put_whole(first, quad);
            return;
        }
#pragma unroll
        for (u32 i = 0; i < QUAD; i++) {
            if (first + i >= 0 && first + i < count) folio::put(table, row, first + i, quad[i]);
        }
    }

    // Writes every tile by a warp of the launch, `part` of `parts` blocks. A warp has neighbouring tiles.
    template <class Ids>
    __device__ __forceinline__ void put_all(u32 part, u32 parts, Ids &ids) const {
        const i64 warps = static_cast<i64>(parts) * WARPS, warp = threadIdx.x / LANES * parts + part;
        const i64 of_warp = (tiles() + warps - 1) / warps, end = min((warp + 1) * of_warp, tiles());
#pragma unroll 1
        for (i64 tile = warp * of_warp; tile < end; tile++) put(tile, ids);
    }

private:
    __device__ __forceinline__ void put_whole(i64 first, const i64 (&quad)[QUAD]) const {
        const i64 at = row * table.stride + first;
        if (table.bytes == 4) {
            *reinterpret_cast<int4 *>(static_cast<i32 *>(table.data) + at) =
                make_int4(static_cast<i32>(quad[0]), static_cast<i32>(quad[1]), static_cast<i32>(quad[2]),
                          static_cast<i32>(quad[3]));
        } else {
            longlong2 *const pairs = reinterpret_cast<longlong2 *>(static_cast<i64 *>(table.data) + at);
            pairs[0] = make_longlong2(quad[0], quad[1]);
            pairs[1] = make_longlong2(quad[2], quad[3]);
        }
    }
};

}  // namespace folio
