// The parameters of kernels/sm90/prefill. src/cuda/prefill_params.rs mirrors them field by field; the size is asserted on
// both sides. No code here.
#pragma once

#include "params/params.h"

struct FolioPrefillParams {
    FolioAttentionParams attention;
    folio_u32 head_dim_vo;  // of the problem: rows of o and of partial results have so many columns
    folio_u32 reserved;
};

// The number of src/cuda/prefill_params.rs.
static_assert(sizeof(FolioPrefillParams) == 384, "Hopper prefill");
