// bf16 queries over fp8 keys: q = high + low, two e4m3 numbers times a power of two for every row. Their 8 bits are those of
// bf16, so that the sum is q itself, down to 2^-9 of the row's largest element, and below that within 2^-17 of it. Both are
// multiplied with keys as they are stored, which costs what one product in 16 bits does, and no conversion of keys.
//
// In shared memory queries keep their place, [64-column block][row][128 bytes], where a row has 64 bytes of high terms, then
// 64 of low ones. Keys are [64-column block][row][64 bytes] with the 64-byte swizzle.
#pragma once

#include "sm90/prefill/tile.cuh"

namespace folio::prefill {

// m64nNk32 with fp32 sums: d = a b, plus d where `accumulate`; a is e4m3.
#define FOLIO_SPLIT_PRODUCT(N, D, A, B, PREDICATE)                                                                     \
    template <class Key>                                                                                               \
    __device__ __forceinline__ void wgmma_of_term(float(&d)[D], u64 a, u64 b, int accumulate);                         \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma_of_term<e4m3>(float(&d)[D], u64 a, u64 b, int accumulate) {                  \
        FOLIO_SPLIT_PRODUCT_OF("e4m3", N, D, A, B, PREDICATE);                                                         \
    }                                                                                                                  \
    template <>                                                                                                        \
    __device__ __forceinline__ void wgmma_of_term<e5m2>(float(&d)[D], u64 a, u64 b, int accumulate) {                  \
        FOLIO_SPLIT_PRODUCT_OF("e5m2", N, D, A, B, PREDICATE);                                                         \
    }
#define FOLIO_SPLIT_PRODUCT_OF(KEY, N, D, A, B, PREDICATE)                                                             \
    asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #PREDICATE                                     \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3." KEY " {" FOLIO_WGMMA_D##D "}, %" #A      \
                 ", %" #B ", accumulate, 1, 1;\n}"                                                                     \
                 : FOLIO_WGMMA_SUMS_##D                                                                                \
                 : "l"(a), "l"(b), "r"(accumulate))

FOLIO_SPLIT_PRODUCT(64, 32, 32, 33, 34)
FOLIO_SPLIT_PRODUCT(80, 40, 40, 41, 42)

// S = Q K for a step.
template <class Key, int N>
__device__ __forceinline__ void add_split_scores(float (&s)[N], u64 q, u32 keys) {
    // A K-major tile with the 64-byte swizzle: atoms of 8 rows, 512 bytes.
    const u64 k = (keys & 0x3ffff) >> 4 | 1ull << 16 | static_cast<u64>(512 >> 4) << 32 | 2ull << 62;
#pragma unroll
    for (int i = 0; i < DIM_QK / 32; ++i) {
        const int block = i / 2, within = i % 2 * 32;
        const u64 high = q + (block * (GROUP_ROWS * 128) + within) / 16, low = high + 64 / 16;
        const u64 of_keys = k + (block * (BLOCK * 64) + within) / 16;
        wgmma_of_term<Key>(s, low, of_keys, i != 0);
        wgmma_of_term<Key>(s, high, of_keys, 1);
    }
}

// The larger of the numbers in either half.
__device__ __forceinline__ u32 max_halves(u32 a, u32 b) {
    u32 y;
    asm("max.u16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// The terms of a pair of bf16, in the low half of a register each.
__device__ __forceinline__ void split_pair(u32 pair, float inverse, u32 &high, u32 &low) {
    const float x = __uint_as_float(pair << 16) * inverse, y = __uint_as_float(pair & 0xffff0000u) * inverse;
    asm("{\n.reg .b16 h, l, hx, hy;\n.reg .b32 hs;\n.reg .f32 fx, fy;\n"
        "cvt.rn.satfinite.e4m3x2.f32 h, %3, %2;\n"
        "cvt.rn.f16x2.e4m3x2 hs, h;\nmov.b32 {hx, hy}, hs;\ncvt.f32.f16 fx, hx;\ncvt.f32.f16 fy, hy;\n"
        "sub.f32 fx, %2, fx;\nsub.f32 fy, %3, fy;\n"
        "cvt.rn.satfinite.e4m3x2.f32 l, fy, fx;\n"
        "cvt.u32.u16 %0, h;\ncvt.u32.u16 %1, l;\n}"
        : "=r"(high), "=r"(low)
        : "f"(x), "f"(y));
}

// A thread of a warpgroup has half of a row: 32 columns of every block of 64, four chunks of 16 bytes.
class QueryHalf {
public:
    static constexpr u32 BLOCKS = DIM_QK / 64;

    __device__ __forceinline__ explicit QueryHalf(u32 queries)
        : row(threadIdx.x % WARPGROUP / 2), half(threadIdx.x % 2), queries(queries + row * 128) {}

    // The bits of its largest magnitude.
    __device__ __forceinline__ u32 largest() const {
        u32 most = 0;
#pragma unroll 1
        for (u32 block = 0; block < BLOCKS; ++block) {
#pragma unroll
            for (u32 n = 0; n < 4; ++n) {
                const uint4 x = ld_shared_v4(chunk(block, 4 * half + n));
                most = max_halves(most, max_halves(max_halves(x.x & 0x7fff7fffu, x.y & 0x7fff7fffu),
                                                   max_halves(x.z & 0x7fff7fffu, x.w & 0x7fff7fffu)));
            }
        }
        return max(most & 0xffffu, most >> 16);
    }

    // Both halves of the row at once: either writes where the other reads.
    __device__ __forceinline__ void split(float inverse) const {
#pragma unroll 1
        for (u32 block = 0; block < BLOCKS; ++block) {
            u32 high[8], low[8];
#pragma unroll
            for (u32 n = 0; n < 4; ++n) {
                const uint4 x = ld_shared_v4(chunk(block, 4 * half + n));
                split_four(x.x, x.y, inverse, high[2 * n], low[2 * n]);
                split_four(x.z, x.w, inverse, high[2 * n + 1], low[2 * n + 1]);
            }
            __syncwarp();
#pragma unroll
            for (u32 n = 0; n < 2; ++n) {
                st_shared_v4(chunk(block, 2 * half + n), {high[4 * n], high[4 * n + 1], high[4 * n + 2], high[4 * n + 3]});
                st_shared_v4(chunk(block, 4 + 2 * half + n), {low[4 * n], low[4 * n + 1], low[4 * n + 2], low[4 * n + 3]});
            }
        }
    }

private:
    __device__ __forceinline__ u32 chunk(u32 block, u32 n) const {
        return queries + block * (GROUP_ROWS * 128) + ((n ^ row % 8) << 4);
    }

    static __device__ __forceinline__ void split_four(u32 first, u32 second, float inverse, u32 &high, u32 &low) {
        u32 h[2], l[2];
        split_pair(first, inverse, h[0], l[0]);
        split_pair(second, inverse, h[1], l[1]);
        high = __byte_perm(h[0], h[1], 0x5410);
        low = __byte_perm(l[0], l[1], 0x5410);
    }

    u32 row, half, queries;
};

// All threads of a warpgroup. `power` gets what the thread's two rows were divided by: the largest element comes to
// [2^7, 2^8). Exponents are kept where the power and its inverse are normal.
__device__ __forceinline__ void split_queries(u32 queries, float (&power)[2]) {
    const QueryHalf half(queries);
    u32 largest = half.largest();
    largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    const u32 exponent = min(max(largest >> 7, 9u), 253u);
    half.split(__uint_as_float(261 - exponent << 23));
    fence_proxy_async();
    const float own = __uint_as_float(exponent - 7 << 23);
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 r = 0; r < 2; ++r) power[r] = __shfl_sync(FULL_WARP, own, 2 * (lane / 4 + 8 * r));
}

}  // namespace folio::prefill
