// A tile of rows in shared memory, swizzled so that eight rows of one 16-byte column lie in eight
// different bank groups, and the copies that fill one from global memory.
#pragma once
#include "common/paged.cuh"

namespace folio {

// ROWS rows of BYTES bytes. Rows are a multiple of 128 bytes, or 64 bytes past one: then two rows share a
// bank line, and the swizzle takes the next bit of the row.
template <int BYTES>
struct TileRow {
    static_assert(BYTES % 64 == 0, "rows are multiples of 64 bytes");
    static constexpr int CHUNKS = BYTES / 16;

    // Offset of 16-byte column `chunk` of row `row`.
    static __device__ __forceinline__ u32 offset(u32 row, u32 chunk) {
        const u32 swizzle = BYTES % 128 == 0 ? row & 7 : (row >> 1) & 3;
        return row * BYTES + ((chunk ^ swizzle) << 4);
    }
};

// Fills the 16 bytes at `target` with `bytes` bytes from `source` and zeros after them. Only multiples of
// `copy_bytes` (16, 8 or 4) are known of the address; `bytes` is one, or 16 or more.
__device__ __forceinline__ void copy_chunk(u32 target, const u8 *source, i32 bytes, u32 copy_bytes) {
    if (copy_bytes == 16) {
        cp_async<16>(target, source, min(max(bytes, 0), 16));
    } else if (copy_bytes == 8) {
#pragma unroll
        for (i32 at = 0; at < 16; at += 8) {
            const i32 part = min(max(bytes - at, 0), 8);
            cp_async<8>(target + at, part ? source + at : source, part);
        }
    } else {
#pragma unroll
        for (i32 at = 0; at < 16; at += 4) {
            const i32 part = min(max(bytes - at, 0), 4);
            cp_async<4>(target + at, part ? source + at : source, part);
        }
    }
}

// One warp copies ROWS (at most 32) rows into rows first_row... of a tile. Lane r holds the address of row
// r; null means zeros. Every row has `row_bytes` bytes, the rest of BYTES is zeros.
template <int ROWS, int BYTES>
__device__ __forceinline__ void copy_rows(u32 tile, u32 first_row, const void *address, i32 row_bytes,
                                          u32 copy_bytes) {
    static_assert(ROWS <= 32, "a lane per row");
    constexpr int CHUNKS = TileRow<BYTES>::CHUNKS;
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < (ROWS * CHUNKS + 31) / 32; i++) {
        const u32 index = lane + 32 * i;
        const u32 row = index / CHUNKS, chunk = index % CHUNKS;
        const u64 shared = __shfl_sync(FULL_WARP, reinterpret_cast<u64>(address), row % 32);
        const u8 *source = reinterpret_cast<const u8 *>(shared);
        const i32 bytes = source ? row_bytes - static_cast<i32>(16 * chunk) : 0;
        if (ROWS * CHUNKS % 32 == 0 || row < ROWS) {
            copy_chunk(tile + TileRow<BYTES>::offset(first_row + row, chunk), bytes > 0 ? source + 16 * chunk : source,
                       bytes, copy_bytes);
        }
    }
}

}  // namespace folio
