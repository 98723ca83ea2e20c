// PTX instructions of sm_80 and up as functions: thin wrappers, no policy. Programmatic dependent launch, which needs
// sm_90, does nothing on older architectures. TMA and mbarriers are in tma.cuh, warpgroup products in wgmma.cuh.
#pragma once
#include "ptx/types.cuh"

namespace folio {

__device__ __forceinline__ u32 shared_address(const void *pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// What the compiler shall keep, and not compute anew in every iteration of a loop.
__device__ __forceinline__ u32 kept(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

template <class T>
__device__ __forceinline__ T *kept(T *x) {
    asm volatile("" : "+l"(x));
    return x;
}

template <bool KEEP, class T>
__device__ __forceinline__ T kept_if(T x) {
    if constexpr (KEEP) return kept(x);
    return x;
}

// --- asynchronous copies, global to shared -------------------------------------------------------

// Copies `source_bytes` (at most BYTES) and fills the rest of BYTES with zeros; nothing is read when
// source_bytes is 0. Both addresses are aligned to BYTES.
template <int BYTES>
__device__ __forceinline__ void cp_async(u32 target, const void *source, u32 source_bytes) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(source_bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(BYTES),
                     "r"(source_bytes)
                     : "memory");
    }
}

// Copies 16 bytes, or writes zeros and reads nothing. One predicate; a size at run time is five instructions more.
__device__ __forceinline__ void cp_async_or_zeros(u32 target, const void *source, bool copies) {
    asm volatile(
        "{\n.reg .pred zeros;\nsetp.eq.u32 zeros, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, zeros;\n}" ::"r"(
            target),
        "l"(source), "r"(static_cast<u32>(copies))
        : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of the thread's latest groups are under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// --- matrix fragments -----------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// An 8x8 matrix of 16-bit elements in registers, two neighbours of row lane / 4 per lane, transposed.
__device__ __forceinline__ u32 transpose_8x8(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ uint2 ld_shared_v2(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void st_shared_v4(u32 address, const u32 (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                 : "memory");
}

// c += a (16x16, row) * b (16x8, column), fp32 accumulation.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- arithmetic -----------------------------------------------------------------------------------

// 2^x; 2^-inf = 0. Largest relative error 2^-22.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// --- programmatic dependent launch ------------------------------------------------------------------

// Waits until the grids this one depends on have completed and their writes are visible. Every kernel
// that may be launched early calls it before it touches memory, and before it exits.
__device__ __forceinline__ void wait_for_prerequisites() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Permits the dependent grid to be scheduled; it still waits for this grid's end before it reads.
__device__ __forceinline__ void allow_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace folio
