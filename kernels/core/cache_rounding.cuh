// Numbers rounded to the elements of a plain cache, and divided by their head's scale before where that is fp8. Every byte is
// the one that the host writes, but for the sign of a NaN. Where they go is append.cuh's.
#pragma once
#include "core/elements.cuh"
#include "core/row_divisor.cuh"
#include "core/scales.cuh"

namespace folio {

// What a head's values are divided by.
__device__ __forceinline__ float cache_divisor(const FolioAppendTensor &t, u32 head) {
    return t.scale * head_scale(t.scales, t.scales_stride, head);
}

// Two numbers rounded to fp8, the first in the low byte.
#if __CUDA_ARCH__ >= 890
template <class Fp8>
__device__ __forceinline__ u32 pack_fp8(float first, float second);
template <>
__device__ __forceinline__ u32 pack_fp8<e4m3>(float first, float second) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}
template <>
__device__ __forceinline__ u32 pack_fp8<e5m2>(float first, float second) {
    u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}
#else
template <class Fp8>
__device__ __forceinline__ u32 pack_fp8(float first, float second) {
    return Fp8::store(first) | Fp8::store(second) << 8;
}
#endif

// Eight quotients in fp8.
template <class Fp8>
__device__ __forceinline__ Elements<VECTOR, Fp8> divided(const float (&x)[VECTOR], const RowDivisor &divisor) {
    u32 pairs[VECTOR / 2];
#pragma unroll
    for (u32 i = 0; i < VECTOR / 2; i++) {
        pairs[i] = pack_fp8<Fp8>(divisor.divide(x[2 * i]), divisor.divide(x[2 * i + 1]));
    }
    Elements<VECTOR, Fp8> out;
    out.half = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    return out;
}

template <class Cached, bool IS_FP8 = Cached::IS_FP8>
class CacheRounding {
public:
    __device__ __forceinline__ CacheRounding(const FolioAppendTensor &, u32) {}

    __device__ __forceinline__ Elements<VECTOR, Cached> vector(const float (&x)[VECTOR]) const {
        return Piece<Cached>(x).elements;
    }
    __device__ __forceinline__ typename Cached::Storage element(float x) const { return Cached::store(x); }
};

template <class Cached>
class CacheRounding<Cached, true> {
public:
    __device__ __forceinline__ CacheRounding(const FolioAppendTensor &t, u32 head) : divisor(cache_divisor(t, head)) {}

    __device__ __forceinline__ Elements<VECTOR, Cached> vector(const float (&x)[VECTOR]) const {
        return divided<Cached>(x, divisor);
    }
    __device__ __forceinline__ typename Cached::Storage element(float x) const {
        return Cached::store(divisor.divide(x));
    }

private:
    RowDivisor divisor;
};

}  // namespace folio
