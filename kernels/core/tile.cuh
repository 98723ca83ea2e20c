// A tile of rows in shared memory, swizzled so that eight rows of one 16-byte column lie in eight different bank
// groups, and the copies by cp.async that fill one from global memory. The generic kernels' tiles: Hopper's have the
// layouts that TMA and wgmma ask for.
#pragma once
#include "core/paged.cuh"

namespace folio {

// ROWS rows of BYTES bytes. Rows are a multiple of 128 bytes, or 64 bytes past one: then two rows share a
// bank line, and the swizzle takes the next bit of the row.
template <int BYTES>
struct TileRow {
    static_assert(BYTES % 64 == 0, "rows are multiples of 64 bytes");
    static constexpr int BYTES_OF_ROW = BYTES, CHUNKS = BYTES / 16;

    // Offset of 16-byte column `chunk` of row `row`.
    static __device__ __forceinline__ u32 offset(u32 row, u32 chunk) {
        const u32 swizzle = BYTES % 128 == 0 ? row & 7 : (row >> 1) & 3;
        return row * BYTES + ((chunk ^ swizzle) << 4);
    }

    // From the address of a column in a tile that is aligned as a swizzled line is, to that `chunks` columns further in the
    // row. `chunks` is a multiple of a power of two that the column is below: of 2 from columns 0 and 1. For constants that is
    // one instruction, and none from one row to another that is swizzled alike.
    static __device__ __forceinline__ u32 step(u32 address, u32 chunks) {
        constexpr u32 SWIZZLED = BYTES % 128 == 0 ? 7 : 3;
        return (address ^ ((chunks & SWIZZLED) << 4)) + ((chunks & ~SWIZZLED) << 4);
    }
};

__device__ __forceinline__ void st_shared_u32(u32 address, u32 x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Fills the 16 bytes at `target` with the first `bytes` (at most 16) from `source` and zeros after them, by
// asynchronous copies of UNIT bytes, to which `source` and `bytes` are aligned.
template <int UNIT>
__device__ __forceinline__ void copy_chunk(u32 target, const u8 *source, i32 bytes) {
#pragma unroll
    for (i32 at = 0; at < 16; at += UNIT) {
        const i32 part = min(max(bytes - at, 0), UNIT);
        cp_async<UNIT>(target + at, part ? source + at : source, part);
    }
}

// The same for rows that are not aligned to 4 bytes, which cp.async cannot read, of bytes that `byte(i)` reads: slow, small,
// and complete when it returns.
template <class Byte>
__device__ __forceinline__ void copy_chunk_bytewise(u32 target, i32 bytes, const Byte &byte) {
#pragma unroll 1
    for (i32 at = 0; at < 16; at += 4) {
        u32 word = 0;
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            if (at + i < bytes) word |= static_cast<u32>(byte(at + i)) << 8 * i;
        }
        st_shared_u32(target + at, word);
    }
}

// What one lane copies of a tile's rows: piece i is 16 bytes of the tile.
template <int ROWS, int BYTES>
struct RowPieces {
    static constexpr int CHUNKS = TileRow<BYTES>::CHUNKS, COUNT = (ROWS * CHUNKS + 31) / 32;
    u32 tile, first_row;
    u64 address;
    i32 row_bytes;

    // copy(target, source, bytes): those bytes and zeros after them.
    template <class Copy>
    __device__ __forceinline__ void copy(int i, const Copy &copy) const {
        const u32 index = threadIdx.x % 32 + 32 * i;
        const u32 row = index / CHUNKS, chunk = index % CHUNKS;
        const u8 *source = reinterpret_cast<const u8 *>(__shfl_sync(FULL_WARP, address, row % 32));
        const i32 bytes = source ? min(max(row_bytes - static_cast<i32>(16 * chunk), 0), 16) : 0;
        if (ROWS * CHUNKS % 32 == 0 || row < ROWS) {
            copy(tile + TileRow<BYTES>::offset(first_row + row, chunk), bytes > 0 ? source + 16 * chunk : source,
                 bytes);
        }
    }
};

// copy_rows for any alignment. One loop: most runs skip this code, and it is there for keys and for values.
template <int ROWS, int BYTES>
__device__ __forceinline__ void copy_unaligned_rows(u32 tile, u32 first_row, const void *address, i32 row_bytes,
                                                    u32 copy_bytes) {
    const RowPieces<ROWS, BYTES> pieces = {tile, first_row, reinterpret_cast<u64>(address), row_bytes};
#pragma unroll 1
    for (int i = 0; i < pieces.COUNT; i++) {
        pieces.copy(i, [=](u32 target, const u8 *source, i32 bytes) {
            if (copy_bytes >= 8) {
                copy_chunk<8>(target, source, bytes);
            } else if (copy_bytes == 4) {
                copy_chunk<4>(target, source, bytes);
            } else {
                copy_chunk_bytewise(target, bytes, [=](i32 i) { return source[i]; });
            }
        });
    }
}

// One warp copies ROWS (at most 32) rows into rows first_row... of a tile. Lane r holds the address of row
// r; null means zeros. Every row has `row_bytes` bytes, the rest of BYTES is zeros. Addresses are multiples
// of copy_bytes, a power of two up to 16.
template <int ROWS, int BYTES>
__device__ __forceinline__ void copy_rows(u32 tile, u32 first_row, const void *address, i32 row_bytes, u32 copy_bytes) {
    static_assert(ROWS <= 32, "a lane per row");
    if (copy_bytes < 16) {
        copy_unaligned_rows<ROWS, BYTES>(tile, first_row, address, row_bytes, copy_bytes);
        return;
    }
    const RowPieces<ROWS, BYTES> pieces = {tile, first_row, reinterpret_cast<u64>(address), row_bytes};
#pragma unroll
    for (int i = 0; i < pieces.COUNT; i++) pieces.copy(i, copy_chunk<16>);
}

// One warp's copies of ROWS rows into rows first_row... of tiles, where a lane knows by itself where the rows are that it
// has a part of: LANES neighbouring lanes share a row, and each copies every LANES-th of its 16-byte columns. No address
// goes from lane to lane, and one copy differs from the next by constants. KEEP: there is a register for the first address.
template <int ROWS, int BYTES, int LANES, bool KEEP>
struct LaneRows {
    static constexpr int ROWS_OF_PASS = 32 / LANES, PASSES = ROWS / ROWS_OF_PASS;
    static constexpr int COPIES = TileRow<BYTES>::CHUNKS / LANES;
    typedef LaneRows<ROWS, 2 * BYTES, LANES, KEEP> Wide;  // of elements of twice the size
    static_assert(LANES == 4 || (LANES == 8 && BYTES % 128 == 0),
                  "rows of all passes, or of every other, are swizzled alike");
    static_assert(PASSES * ROWS_OF_PASS == ROWS && COPIES * LANES == TileRow<BYTES>::CHUNKS, "whole passes");
    u32 first;  // where the lane's first column of its first row is in a tile

    // The row that the lane has a part of in a pass.
    static __device__ __forceinline__ u32 row(int pass) { return threadIdx.x % 32 / LANES + pass * ROWS_OF_PASS; }

    static __device__ __forceinline__ u32 column() { return threadIdx.x % LANES; }

    // `stride`: columns from a lane's to the next one's.
    __device__ __forceinline__ explicit LaneRows(u32 first_row, u32 stride = 1)
        : first(kept_if<KEEP>(TileRow<BYTES>::offset(first_row + row(0), stride * column()))) {}

    // Where the lane's column `i` in the row of a pass is. Four rows further the third bit of the swizzle is another.
    __device__ __forceinline__ u32 at(u32 tile, int pass, int i) const {
        const u32 swizzle = ROWS_OF_PASS == 4 ? pass % 2 * 64 : 0;
        return TileRow<BYTES>::step((tile + first) ^ swizzle, LANES * i) + pass * ROWS_OF_PASS * BYTES;
    }

    // Columns of `source`, which points at the lane's first, to the row of a pass. The lane's columns from `columns` on,
    // counted in those of the row, become zeros.
    __device__ __forceinline__ void copy(u32 tile, int pass, const u8 *source, i32 columns) const {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            cp_async_or_zeros(at(tile, pass, i), source + 16 * LANES * i, LANES * i < columns);
        }
    }

    // The lane's bytes, which are elements of the type, to rows of 16-bit numbers of another tile, where lanes are two columns
    // apart.
    template <class T, class Element>
    __device__ __forceinline__ void widen(u32 tile, const Wide &wide, u32 wide_tile) const {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const u32 from = at(tile, pass, i), to = wide.at(wide_tile, pass, 2 * i);
                const uint2 pair[] = {ld_shared_v2(from), ld_shared_v2(from + 8)};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 x = pair[half].x, y = pair[half].y;
                    const u32 numbers[] = {Element::template widen<T, 0, 1>(x), Element::template widen<T, 2, 3>(x),
                                           Element::template widen<T, 0, 1>(y), Element::template widen<T, 2, 3>(y)};
                    st_shared_v4(to ^ 16 * half, numbers);
                }
            }
        }
    }

    // What `of_pass(pass)` is for row r, to lane r.
    template <class OfPass>
    static __device__ __forceinline__ auto of_lane(OfPass of_pass) -> decltype(of_pass(0)) {
        const u32 lane = threadIdx.x % 32;
        decltype(of_pass(0)) mine = nullptr;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const u64 address =
                __shfl_sync(FULL_WARP, reinterpret_cast<u64>(of_pass(pass)), lane % ROWS_OF_PASS * LANES);
            if (lane / ROWS_OF_PASS == pass) mine = reinterpret_cast<decltype(mine)>(address);
        }
        return mine;
    }
};

// The 16 bytes of a row in two places that begin at byte `at`: `split` bytes are at `leading`, the others at `trailing`.
// Any of them may be in either place: slow, and complete when it returns.
__device__ __forceinline__ void copy_split_chunk(u32 target, const u8 *leading, const u8 *trailing, i32 at, i32 split,
                                                 i32 bytes) {
    copy_chunk_bytewise(target, bytes,
                        [=](i32 i) { return at + i < split ? leading[at + i] : trailing[at + i - split]; });
}

// The address of a row, which lane `row % 32` holds.
__device__ __forceinline__ const u8 *row_address(const void *address, u32 row) {
    return reinterpret_cast<const u8 *>(__shfl_sync(FULL_WARP, reinterpret_cast<u64>(address), row % 32));
}

// copy_rows for rows in two places: the first `split` bytes at `address`, the rest of `row_bytes` at `second`. Where
// addresses and `split` are multiples of 16 bytes, as copy_bytes says, every piece is in one place.
template <int ROWS, int BYTES>
__device__ __forceinline__ void copy_split_rows(u32 tile, u32 first_row, const void *address, const void *second,
                                                i32 split, i32 row_bytes, u32 copy_bytes) {
    constexpr int CHUNKS = TileRow<BYTES>::CHUNKS, COUNT = (ROWS * CHUNKS + 31) / 32;
#pragma unroll 1
    for (int i = 0; i < COUNT; i++) {
        const u32 index = threadIdx.x % 32 + 32 * i, row = index / CHUNKS;
        const i32 at = index % CHUNKS * 16;
        const u8 *leading = row_address(address, row), *trailing = row_address(second, row);
        if (ROWS * CHUNKS % 32 != 0 && row >= ROWS) continue;
        const i32 bytes = leading ? min(max(row_bytes - at, 0), 16) : 0;
        const u32 target = tile + TileRow<BYTES>::offset(first_row + row, at / 16);
        if (copy_bytes == 16) {
            const u8 *source = at < split ? leading + at : trailing + (at - split);
            copy_chunk<16>(target, bytes > 0 ? source : leading, bytes);
        } else {
            copy_split_chunk(target, leading, trailing, at, split, bytes);
        }
    }
}

}  // namespace folio
