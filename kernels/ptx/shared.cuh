// Loads of 16 bytes from shared memory by address: thin wrappers, no policy. Smaller ones are in ptx.cuh.
#pragma once
#include "ptx/types.cuh"

namespace folio {

__device__ __forceinline__ uint4 ld_shared_v4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

}  // namespace folio
