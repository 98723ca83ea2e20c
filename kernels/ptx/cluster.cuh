// Clusters of CTAs on Hopper: ranks, the barrier of a cluster, mbarriers of its other CTAs, and loads to several of them.
// Thin wrappers over PTX, no policy. What one CTA does alone is in tma.cuh.
#pragma once
#include "ptx/tma.cuh"

namespace folio {

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all CTAs of the cluster.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrives at the barrier that has this address in the CTA of that rank. It orders nothing that this CTA wrote for others:
// with the scope of a cluster the compiler would put a fence of the whole device before it.
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// A box to the same place of all CTAs in `ranks`, one bit each; its bytes arrive at the barrier of each.
__device__ __forceinline__ void tma_multicast_3d(u32 dst, const TensorMap *map, u32 barrier, int c0, int c1, int c2,
                                                 u32 ranks) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%3, %4, %5}], [%2], %6;"
        :
        : "r"(dst), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(static_cast<u16>(ranks))
        : "memory");
}

}  // namespace folio
