// Stores by tensor maps, and the way of results from registers through shared memory to them. Beside tma.cuh, which
// loads. Thin wrappers over PTX, no policy.
#pragma once
#include "ptx/tma.cuh"

namespace folio {

// What lies outside the tensor is not written.
__device__ __forceinline__ void tma_store_3d(const TensorMap *map, u32 source, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
                 :
                 : "l"(map), "r"(source), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the thread's stores have read their shared memory, but for those of the last PENDING groups.
template <int PENDING = 0>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Four 8x8 matrices of 16-bit elements from registers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

}  // namespace folio
