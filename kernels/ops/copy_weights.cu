// Copies weights with any strides, in tiles of 32 by 32 through shared memory: threads next to one another read, and then
// write, along the dimension whose elements are nearest.
#include "core/dtype.cuh"
#include "params/projection.h"

namespace folio {

typedef FOLIO_Q Source;
typedef FOLIO_KV Target;

constexpr u32 TILE = 32;

// Row and column of the thread's element in line `line` of a tile.
__device__ __forceinline__ uint2 place(bool along_rows, u32 line) {
    const u32 lane = threadIdx.x % TILE;
    return along_rows ? make_uint2(lane, line) : make_uint2(line, lane);
}

}  // namespace folio

// Grid: a CTA per tile, columns fastest, then rows, then heads.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_copy_weights(const __grid_constant__ FolioCopyWeightsParams p) {
    using namespace folio;
    __shared__ Source::Storage tile[TILE][TILE + 1];
    wait_for_prerequisites();
    const u32 column_blocks = (p.columns - 1) / TILE + 1, row_blocks = (p.rows - 1) / TILE + 1;
    const u32 first_column = blockIdx.x % column_blocks * TILE, rest = blockIdx.x / column_blocks;
    const u32 first_row = rest % row_blocks * TILE, head = rest / row_blocks;
    const auto *source = static_cast<const Source::Storage *>(p.source) + head * p.source_stride_head;
    auto *target = static_cast<Target::Storage *>(p.target) + head * p.target_stride_head;
    const bool read_rows = p.source_stride_row < p.source_stride_column;
    const bool write_rows = p.target_stride_row < p.target_stride_column;
    for (u32 line = threadIdx.x / TILE; line < TILE; line += FOLIO_THREADS / TILE) {
        const uint2 at = place(read_rows, line);
        const u32 row = first_row + at.x, column = first_column + at.y;
        if (row < p.rows && column < p.columns) {
            tile[at.x][at.y] = source[row * p.source_stride_row + column * p.source_stride_column];
        }
    }
    __syncthreads();
    for (u32 line = threadIdx.x / TILE; line < TILE; line += FOLIO_THREADS / TILE) {
        const uint2 at = place(write_rows, line);
        const u32 row = first_row + at.x, column = first_column + at.y;
        if (row < p.rows && column < p.columns) {
            target[row * p.target_stride_row + column * p.target_stride_column] =
                Target::store(Source::load(tile[at.x][at.y]));
        }
    }
}
