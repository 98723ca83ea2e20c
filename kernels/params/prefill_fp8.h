// The parameters of kernels/sm90/prefill_fp8. src/cuda/prefill_fp8_params.rs mirrors them field by field; the size is
// asserted on both sides. No code here.
#pragma once

#include "params/params.h"

struct FolioPrefillFp8Params {
    FolioAttentionParams attention;
    folio_u32 o_dtype;      // FolioDtype
    folio_u32 page_groups;  // groups of 8 tokens from page to page, of k as of v
};

// The number of src/cuda/prefill_fp8_params.rs.
static_assert(sizeof(FolioPrefillFp8Params) == 384, "Hopper prefill in fp8");
