// Queries in fp8 become fp16 where they are loaded: every number of e4m3 and e5m2 is one of fp16, NaN too. Kernels over
// fp8 caches that take their products in fp16 thus serve them with no variant of their own.
#pragma once
#include "core/tile.cuh"
#include "params/query_type.h"

namespace folio {

__device__ __forceinline__ bool queries_are_fp8(const FolioAttentionParams &p) {
    return p.flags & (FOLIO_QUERIES_E4M3 | FOLIO_QUERIES_E5M2);
}

// Two bytes of a register as a pair of fp16, the first in the low half.
__device__ __forceinline__ u32 widen_queries(u32 bytes, int first, bool is_e4m3) {
    const u8 a = bytes >> 8 * first, b = bytes >> (8 * first + 8);
    return is_e4m3 ? f16::pack(e4m3::load(a), e4m3::load(b)) : f16::pack(e5m2::load(a), e5m2::load(b));
}

// copy_rows for rows of `count` fp8 elements, which become BYTES of fp16: complete when it returns. `count` is a multiple
// of 8, the elements of a 16-byte piece of the tile.
template <int ROWS, int BYTES>
__device__ __forceinline__ void copy_fp8_rows(u32 tile, u32 first_row, const void *address, u32 count, u32 copy_bytes,
                                              bool is_e4m3) {
    constexpr int CHUNKS = TileRow<BYTES>::CHUNKS, COUNT = (ROWS * CHUNKS + 31) / 32;
#pragma unroll 1
    for (int i = 0; i < COUNT; i++) {
        const u32 index = threadIdx.x % 32 + 32 * i, row = index / CHUNKS, chunk = index % CHUNKS;
        const u8 *source = row_address(address, row);
        if (ROWS * CHUNKS % 32 != 0 && row >= ROWS) continue;
        uint2 bytes = make_uint2(0, 0);
        if (source && 8 * chunk < count) {
            source += 8 * chunk;
            if (copy_bytes >= 8) {
                bytes = *reinterpret_cast<const uint2 *>(source);
            } else {
#pragma unroll
                for (int b = 0; b < 4; b++) {
                    bytes.x |= static_cast<u32>(source[b]) << 8 * b;
                    bytes.y |= static_cast<u32>(source[4 + b]) << 8 * b;
                }
            }
        }
        const u32 words[4] = {widen_queries(bytes.x, 0, is_e4m3), widen_queries(bytes.x, 2, is_e4m3),
                              widen_queries(bytes.y, 0, is_e4m3), widen_queries(bytes.y, 2, is_e4m3)};
        st_shared_v4(tile + TileRow<BYTES>::offset(first_row + row, chunk), words);
    }
}

}  // namespace folio
