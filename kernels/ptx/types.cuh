// Short names of the fixed-width types of params/params.h, for all device code. Nothing else: element types
// of tensors are in core/dtype.cuh.
#pragma once
#include "params/params.h"

namespace folio {

typedef unsigned char u8;
typedef unsigned short u16;
typedef folio_u32 u32;
typedef folio_i32 i32;
typedef folio_i64 i64;
typedef unsigned long long u64;

constexpr u32 FULL_WARP = 0xffffffffu;

}  // namespace folio
