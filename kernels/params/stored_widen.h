// The parameters of kernels/widen/widen_stored.cu. src/cuda/stored_params.rs mirrors them field by field; the size is
// asserted on both sides. No code here.
#pragma once

#include "params/stored.h"
#include "params/widen.h"

struct FolioStoredWidenParams {
    FolioWidenParams widen;  // k, v and cache_dtype are not used
    FolioStored cache;       // without scales of whole heads
    // Where widen.units are: what rows of k and of v are to be multiplied by, scales of whole heads included. In the shape of
    // those.
    float *k_factors, *v_factors;
    const float *k_scales, *v_scales;  // of whole heads, as FolioAttentionParams has them
    folio_i32 k_scales_stride, v_scales_stride;
    folio_u32 flags;  // FolioRunFlag
    folio_u32 reserved;
};

// The number of src/cuda/stored_params.rs.
static_assert(sizeof(FolioStoredWidenParams) == 568, "widening of other forms");
