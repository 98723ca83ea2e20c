// The parameters of the kernel that normalises, rotates and appends to caches in other forms than rows of plain elements.
// src/cuda/stored_params.rs mirrors them field by field; sizes are asserted on both sides. No code here.
#pragma once

#include "params/rope_append.h"
#include "params/stored.h"

// kernels/ops/rope_append_stored.cu. Caches and scales of `rope.append` are not used, nor are rope.units_of_token.
struct FolioStoredRopeAppendParams {
    FolioRopeAppendParams rope;
    FolioStored cache;
    folio_u32 row_dtype;      // FolioDtype of queries, keys and values
    folio_u32 value_vectors;  // rows of values are 16-byte aligned and a multiple of 8 elements long
};

// The numbers of src/cuda/stored_params.rs.
static_assert(sizeof(FolioStoredRopeAppendParams) == 2696, "rope append to stored caches");
