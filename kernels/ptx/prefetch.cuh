// Hints to the L2 about lines that are wanted soon.
#pragma once
#include "ptx/types.cuh"

namespace folio {

// Fetches the line of global memory that an address is in.
__device__ __forceinline__ void prefetch_l2(const void *at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

}  // namespace folio
