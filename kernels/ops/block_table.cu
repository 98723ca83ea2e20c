// Makes a block table of a list. Some warps take a row.
#include "core/quads.cuh"

namespace folio {

typedef FolioBlockTableParams Params;

// Writes columns [first, first + count) of a row by a warp: the row's part of the list, and then what fills it.
__device__ __forceinline__ void put_columns(const Params &p, i64 b, i64 first, u32 count) {
    const bool is_request = b < p.batch_size;
    const i64 begin = is_request ? clamp(get(p.kv_indptr, 0, b), p.kv_indices.columns) : 0;
    const i64 end = is_request ? clamp(get(p.kv_indptr, 0, b + 1), p.kv_indices.columns) : 0;
    const u32 listed = static_cast<u32>(clamp(end - begin - first, count));
    if (p.kv_indices.bytes == 4 && p.block_table.bytes == 4) {
        const i32 *const ids = static_cast<const i32 *>(p.kv_indices.data) + begin + first;
        i32 *const out = static_cast<i32 *>(p.block_table.data) + b * p.block_table.stride + first;
        put_quads<2>(out, count, [&](u32 i) { return i < listed ? max(__ldg(ids + i), -1) : p.fill; });
        return;
    }
#pragma unroll 1
    for (u32 i = threadIdx.x % LANES; i < count; i += LANES) {
        if (i < listed) {
            put_id(p.block_table, b, first + i, get(p.kv_indices, 0, begin + first + i));
        } else {
            put(p.block_table, b, first + i, p.fill);
        }
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_block_table(const __grid_constant__ FolioBlockTableParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const i64 warp = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / LANES, b = warp / p.parts;
    if (b >= p.block_table.rows) return;
    const i64 columns = p.block_table.columns, of_warp = (columns + p.parts - 1) / p.parts;
    const i64 first = (warp - b * p.parts) * of_warp;
    if (first < columns) put_columns(p, b, first, static_cast<u32>(min(of_warp, columns - first)));
}
