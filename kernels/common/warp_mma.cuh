// One warp's tools: ldmatrix, mma.sync m16n8k16, cp.async, conversions between storage types and float.
// Thin wrappers over PTX for sm_80 and later; storage types are raw bits behind tag types.
#pragma once

namespace folio {

struct Bf16 {};
struct F16 {};
struct E4m3 {};
struct E5m2 {};

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

template <class T>
constexpr int byte_size = is_same<T, E4m3> || is_same<T, E5m2> ? 1 : 2;

#define kInfinity __int_as_float(0x7f800000)

__device__ __forceinline__ unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// 2^x; subnormal results are flushed.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The low half holds `lo`.
template <class T>
__device__ __forceinline__ unsigned pack2(float lo, float hi) {
    unsigned r;
    if constexpr (is_same<T, Bf16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    }
    return r;
}

template <class T>
__device__ __forceinline__ float2 unpack2(unsigned bits) {
    if constexpr (is_same<T, Bf16>) {
        return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    } else {
        float2 r;
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
            : "=f"(r.x), "=f"(r.y) : "r"(bits));
        return r;
    }
}

// Two fp8 values, rounded to nearest and saturated; the low byte holds `lo`.
template <class T>
__device__ __forceinline__ unsigned short pack2_fp8(float lo, float hi) {
    unsigned short r;
    if constexpr (is_same<T, E4m3>) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    }
    return r;
}

// Four fp8 values to two f16 pairs: exact, every fp8 value is an f16 value.
template <class T>
__device__ __forceinline__ void widen_fp8(unsigned bytes, unsigned &low_pair, unsigned &high_pair) {
    if constexpr (is_same<T, E4m3>) {
        asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
            : "=r"(low_pair), "=r"(high_pair) : "r"(bytes));
    } else {
        // e5m2 is the upper byte of an f16.
        asm("prmt.b32 %0, %1, 0, 0x1404;" : "=r"(low_pair) : "r"(bytes));
        asm("prmt.b32 %0, %1, 0, 0x3424;" : "=r"(high_pair) : "r"(bytes));
    }
}

__device__ __forceinline__ unsigned permute_bytes(unsigned a, unsigned b, unsigned selector) {
    unsigned r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// An 8 x 8 matrix of 16-bit elements, one row per four lanes, transposed across the warp.
__device__ __forceinline__ unsigned transpose_8x8(unsigned x) {
    unsigned r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

// d += a b, 16 x 8 x 16, fp32 accumulators.
template <class T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const unsigned (&a)[4],
                                          const unsigned (&b)[2]) {
    if constexpr (is_same<T, Bf16>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
            " {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
            " {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
}

// Copies 16 bytes, or writes 16 zero bytes without reading when `present` is false.
__device__ __forceinline__ void cp_async_16(unsigned dst, const void *src, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(dst), "l"(src), "r"(present ? 16 : 0) : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most N groups of the calling thread are in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void store_shared_zero_16(unsigned address) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

}  // namespace folio
