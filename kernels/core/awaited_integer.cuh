// Integers of 4 or 8 bytes that are asked for at one place and waited for at another. To convert one is to wait for it, so words
// stay as they came until the value is needed.
#pragma once
#include "ptx/types.cuh"

namespace folio {

class AwaitedInteger {
public:
    __device__ __forceinline__ void ask(const void *integers, u32 bytes, i64 index) {
        const u32 *const number = static_cast<const u32 *>(integers) + index * (bytes / 4);
        words[0] = number[0];
        if (bytes == 8) words[1] = number[1];
    }

    __device__ __forceinline__ i64 value(u32 bytes) const {
        return bytes == 8 ? static_cast<i64>(static_cast<u64>(words[1]) << 32 | words[0]) : static_cast<i32>(words[0]);
    }

private:
    u32 words[2];
};

}  // namespace folio
