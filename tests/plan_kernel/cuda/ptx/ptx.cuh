// Stands in for kernels/ptx/ptx.cuh: the built-ins of CUDA that the planning kernels use, for a thread block of thread_block.h.
// Threads of a warp come to them together, as the kernels promise by their full masks. No instruction of a device.
#pragma once
#include "ptx/types.cuh"

#include <algorithm>
#include <cstring>

#include "thread_block.h"

struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};

namespace folio {

// Named by headers of element types, and called by none of what is tested.
u32 __float_as_uint(float);
float __uint_as_float(u32);
i32 __float2int_rn(float);
u32 __byte_perm(u32, u32, u32);
float2 make_float2(float, float);
void mma_m16n8k16_f16(float (&)[4], const u32 (&)[4], u32, u32);
void mma_m16n8k16_bf16(float (&)[4], const u32 (&)[4], u32, u32);

using std::max;
using std::min;

inline void __syncthreads() { ThreadBlock::running().await_block(); }
inline void __syncwarp() { ThreadBlock::running().exchange(0); }

template <class T>
T __shfl_sync(u32, T value, u32 lane) {
    return ThreadBlock::running().of_lane(value, lane % 32);
}
template <class T>
T __shfl_up_sync(u32, T value, u32 lanes) {
    const u32 lane = threadIdx.x % 32;
    return ThreadBlock::running().of_lane(value, lane < lanes ? lane : lane - lanes);
}

inline u32 __reduce_add_sync(u32, u32 x) {
    u32 sum = 0;
    for (const u64 of_lane : ThreadBlock::running().exchange(x)) sum += static_cast<u32>(of_lane);
    return sum;
}
inline u32 __reduce_max_sync(u32, u32 x) {
    const auto &all = ThreadBlock::running().exchange(x);
    return static_cast<u32>(*std::max_element(all.begin(), all.end()));
}
inline u32 __reduce_min_sync(u32, u32 x) {
    const auto &all = ThreadBlock::running().exchange(x);
    return static_cast<u32>(*std::min_element(all.begin(), all.end()));
}
inline u32 __match_any_sync(u32, u32 x) {
    u32 lanes = 0, lane = 0;
    for (const u64 of_lane : ThreadBlock::running().exchange(x)) lanes |= (of_lane == x ? 1u : 0u) << lane++;
    return lanes;
}
inline u32 __ballot_sync(u32, bool is_so) {
    u32 lanes = 0, lane = 0;
    for (const u64 of_lane : ThreadBlock::running().exchange(is_so)) lanes |= static_cast<u32>(of_lane) << lane++;
    return lanes;
}

inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(u32 x) { return __builtin_ffs(static_cast<int>(x)); }
inline u32 __umulhi(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }

// Threads take turns only where they wait.
inline u32 atomicAdd(u32 *at, u32 x) { return *at += x, *at - x; }
inline u32 atomicMin(u32 *at, u32 x) {
    const u32 before = *at;
    *at = min(before, x);
    return before;
}
inline u32 atomicMax(u32 *at, u32 x) {
    const u32 before = *at;
    *at = max(before, x);
    return before;
}

inline float reciprocal_approx(float x) { return 1.0f / x; }
inline void wait_for_prerequisites() {}

}  // namespace folio
