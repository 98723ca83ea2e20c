// Warpgroup matrix instructions of Hopper with sixteen columns: the wide operand A has 64 rows, and B, the narrow one,
// is in shared memory, K-major. Thin wrappers over PTX; descriptors, fences and waits are wgmma.cuh's. No policy.
#pragma once

#include "ptx/wgmma.cuh"

namespace folio {

// A K-major tile in shared memory without a swizzle: core matrices of 8 rows x 16 bytes, 128 bytes each. `along_k` leads
// to the next core matrix along k, `along_rows` to the next 8 rows. All in bytes.
__device__ __forceinline__ u64 wgmma_plain_descriptor(u32 address, u32 along_k, u32 along_rows) {
    return (address & 0x3ffff) >> 4 | static_cast<u64>(along_k >> 4) << 16 | static_cast<u64>(along_rows >> 4) << 32;
}

// m64n16k16: d = a b, plus d where `accumulate`. The accumulator of column 8 j + 2 (lane % 4) + c, row
// 16 warp + lane / 4 + 8 r is d[4 j + 2 r + c]. A is in shared memory, as it is (K-major) or TRANSPOSED (M-major).
template <class T, int TRANSPOSED>
__device__ __forceinline__ void wgmma_n16_ss(float (&d)[8], u64 a, u64 b, int accumulate) {
    if constexpr (T::IS_BF16) {
        asm volatile(
            "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, "
            "accumulate, 1, 1, %11, 0;\n}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
    } else {
        asm volatile(
            "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %10, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, "
            "accumulate, 1, 1, %11, 0;\n}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSED));
    }
}

// The same with A in registers: a[0] row lane / 4, columns 2 (lane % 4) and the next; a[1] row + 8; a[2] and a[3] the
// same rows, columns + 8.
template <class T>
__device__ __forceinline__ void wgmma_n16_rs(float (&d)[8], const u32 (&a)[4], u64 b, int accumulate) {
    if constexpr (T::IS_BF16) {
        asm volatile(
            "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
            "{%8, %9, %10, %11}, %12, accumulate, 1, 1, 0;\n}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    } else {
        asm volatile(
            "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %13, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
            "{%8, %9, %10, %11}, %12, accumulate, 1, 1, 0;\n}"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
    }
}

}  // namespace folio
