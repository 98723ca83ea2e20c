// int32 that a warp writes by four of a lane, in stores of 16 bytes.
#pragma once
#include "core/integers.cuh"

namespace folio {

// Writes `count` numbers: id(i) is the i-th one. It is asked for those of AT_ONCE quads before they are written.
template <u32 AT_ONCE, class Id>
__device__ __forceinline__ void put_quads(i32 *out, u32 count, const Id &id) {
    const i32 lead = static_cast<i32>(reinterpret_cast<u64>(out) / sizeof(i32) % 4);
#pragma unroll AT_ONCE
    for (i32 first = 4 * static_cast<i32>(threadIdx.x % LANES) - lead; first < static_cast<i32>(count);
         first += 4 * LANES) {
        i32 ids[4];
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            // Before the first and behind the last one is one of those, which is not written there.
            ids[i] = id(static_cast<u32>(min(max(first + i, 0), static_cast<i32>(count) - 1)));
        }
        if (first >= 0 && first + 4 <= static_cast<i32>(count)) {
            *reinterpret_cast<int4 *>(out + first) = make_int4(ids[0], ids[1], ids[2], ids[3]);
            continue;
        }
#pragma unroll
        for (i32 i = 0; i < 4; i++) {
            if (first + i >= 0 && first + i < static_cast<i32>(count)) out[first + i] = ids[i];
        }
    }
}

}  // namespace folio
