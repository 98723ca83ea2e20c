// Tiles of fewer rows for batches that would leave workers idle: they end earlier, as src/plan/schedule.rs has it. Keys are not
// cut here.
#pragma once
#include "plan/planning.cuh"

namespace folio {

// The narrowest tiles that all run at a time, or those that are stated.
__device__ __forceinline__ const FolioDivisor &narrowest_tile(const FolioPlanNarrow &narrow, const Requests &all,
                                                              const Batch &batch) {
    __shared__ u32 tiles[FOLIO_NARROW_TILES];
    if (narrow.count == 0 || batch.tiles > narrow.at_a_time) return batch.tiling.q_tile;
    if (threadIdx.x < narrow.count) tiles[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 1
    for (u32 n = 0; n < narrow.count; n++) {
        u32 own = 0;
#pragma unroll 1
        for (u32 b = all.begin; b < all.end; b++) own += divide_up(all.request[b].rows, narrow.q_tile[n]);
        own = __reduce_add_sync(FULL_WARP, own);
        if (lane_index() == 0) atomicAdd(&tiles[n], own);
    }
    __syncthreads();
#pragma unroll 1
    for (u32 n = 0; n < narrow.count; n++) {
        if (tiles[n] <= narrow.at_a_time) return narrow.q_tile[n];
    }
    return batch.tiling.q_tile;
}

}  // namespace folio
