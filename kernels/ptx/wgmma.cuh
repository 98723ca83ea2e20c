// Warpgroup matrix instructions of Hopper: descriptors of shared memory, ordering, and the registers of a warpgroup. Thin
// wrappers over PTX; the products themselves are in wgmma_products.cuh. No policy.
#pragma once

#include "ptx/types.cuh"

namespace folio {

// A tile in shared memory with the 128-byte swizzle: 1024-byte atoms of 8 rows x 128 bytes. K-major operands
// ignore `leading`; for transposed ones it is the stride between 64-column blocks. `stride` leads to the next
// 8 rows. All in bytes.
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 leading, u32 stride) {
    return (address & 0x3ffff) >> 4 | static_cast<u64>(leading >> 4) << 16 | static_cast<u64>(stride >> 4) << 32 |
           1ull << 62;
}

// A K-major tile in shared memory without a swizzle: core matrices of 8 rows x 16 bytes, 128 bytes each. `along_k` leads
// to the next core matrix along k, `along_rows` to the next 8 rows. All in bytes.
__device__ __forceinline__ u64 wgmma_plain_descriptor(u32 address, u32 along_k, u32 along_rows) {
    return (address & 0x3ffff) >> 4 | static_cast<u64>(along_k >> 4) << 16 | static_cast<u64>(along_rows >> 4) << 32;
}

// Orders register accesses before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most N committed groups are in flight.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving accesses to registers that a wgmma uses across this point.
template <int N>
__device__ __forceinline__ void pin(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int N>
__device__ __forceinline__ void pin(u32 (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

// Begins new values in registers that the next wgmma writes without reading: the old ones need not be kept.
template <int N>
__device__ __forceinline__ void renew(float (&r)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "=f"(r[i])::"memory");
}

// Registers per thread of the calling warpgroup, a multiple of 8; more needs a warpgroup that gave some up.
template <int REGISTERS>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace folio
