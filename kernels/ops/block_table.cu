// Makes a block table of a list. Some warps take a row.
#include "core/quads.cuh"

namespace folio {

typedef FolioBlockTableParams Params;

// A row of the table: its part of the list, and then what fills it.
struct Row {
    const Params &p;
    i64 begin, end;

    __device__ __forceinline__ Row(const Params &p, u32 b) : p(p), begin(0), end(0) {
        if (b >= p.batch_size) return;
        begin = clamp(get(p.kv_indptr, 0, b), p.kv_indices.columns);
        end = clamp(get(p.kv_indptr, 0, b + 1), p.kv_indices.columns);
    }

    __device__ __forceinline__ i64 reach(i64, i64 to) const { return to; }

    __device__ __forceinline__ i64 operator[](i64 column) const {
        if (begin + column >= end) return p.fill;
        return id_in(p.block_table, get(p.kv_indices, 0, begin + column));
    }
};

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_block_table(const __grid_constant__ FolioBlockTableParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const i64 warp = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / LANES;
    const i64 b = warp / p.parts;
    if (b >= p.block_table.rows) return;
    const Row row(p, static_cast<u32>(b));
    const TiledRow tiled(p.block_table, b, p.block_table.columns);
    for (i64 tile = warp - b * p.parts; tile < tiled.tiles(); tile += p.parts) tiled.put(tile, row);
}
