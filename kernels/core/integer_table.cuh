// Reading a list or a table of int32 or int64.
#pragma once
#include "params/integers.h"
#include "ptx/ptx.cuh"

namespace folio {

// Reads the halves of a number, without a branch: this is everywhere, and cold code costs more than a select.
__device__ __forceinline__ i64 get(const FolioIntegers &table, i64 row, i64 column) {
    const bool is_wide = table.bytes == 8;
    const u32 *const number = static_cast<const u32 *>(table.data) + ((row * table.stride + column) << is_wide);
    const u32 low = number[0];
    const i32 high = is_wide ? static_cast<i32>(number[1]) : static_cast<i32>(low) >> 31;
    return static_cast<i64>(static_cast<u64>(static_cast<u32>(high)) << 32 | low);
}

}  // namespace folio
