// What kernels that stream records need of Hopper beside tma.cuh: copies with an L2 policy, completions of cp.async on
// an mbarrier, named barriers, and transposed stores of fragments. Thin wrappers over PTX, no policy.
#pragma once

#include "ptx/tma.cuh"

namespace folio {

__device__ __forceinline__ void tma_load_4d(u32 dst, const TensorMap *map, u32 barrier, int c0, int c1, int c2, int c3,
                                            u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
        :
        : "r"(dst), "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
        : "memory");
}

// Neighbouring bytes, without a tensor map. Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 dst, const void *source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        :
        : "r"(dst), "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// One of the barrier's arrivals, made when the thread's copies by cp.async so far have arrived.
__device__ __forceinline__ void mbarrier_arrive_by_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A barrier of `threads` threads of the block, whole warps. Number 0 is that of __syncthreads.
__device__ __forceinline__ void group_sync(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// The same, and whether `mine` was set in any of the threads.
__device__ __forceinline__ bool group_any(u32 number, u32 threads, bool mine) {
    u32 any;
    asm volatile(
        "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %3, 0;\nbar.red.or.pred any, %1, %2, mine;\n"
        "selp.u32 %0, 1, 0, any;\n}"
        : "=r"(any)
        : "r"(number), "r"(threads), "r"(static_cast<u32>(mine))
        : "memory");
    return any;
}

// Four 8x8 matrices of 16-bit elements, two neighbours of row lane / 4 per lane, each stored transposed; lane l gives the
// address of row l % 8, a column of what is in registers, of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ __forceinline__ float4 ld_shared_f4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

}  // namespace folio
