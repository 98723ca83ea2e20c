// Four fp8 values of a register as two pairs of fp16, by the instruction that sm_90 has: exact, and NaN stays NaN.
#pragma once
#include "core/dtype.cuh"

namespace folio {

template <class Fp8>
__device__ __forceinline__ void widen_fp8(u32 bytes, u32 &low_pair, u32 &high_pair);
template <>
__device__ __forceinline__ void widen_fp8<e4m3>(u32 bytes, u32 &low_pair, u32 &high_pair) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low_pair), "=r"(high_pair)
        : "r"(bytes));
}
template <>
__device__ __forceinline__ void widen_fp8<e5m2>(u32 bytes, u32 &low_pair, u32 &high_pair) {
    low_pair = spread_bytes<0, 1>(bytes);
    high_pair = spread_bytes<2, 3>(bytes);
}

}  // namespace folio
