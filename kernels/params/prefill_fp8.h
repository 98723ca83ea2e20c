// The parameters of kernels/sm90/prefill_fp8. src/cuda/prefill_fp8_params.rs mirrors them field by field; the size is
// asserted on both sides. No code here.
#pragma once

#include "params/params.h"

struct FolioPrefillFp8Params {
    FolioAttentionParams attention;
    folio_u32 o_dtype;  // FolioDtype
    // From page to page of k and v, in groups of 8 tokens.
    folio_u32 k_page_groups, v_page_groups;
    folio_u32 reserved;
};

// The number of src/cuda/prefill_fp8_params.rs.
static_assert(sizeof(FolioPrefillFp8Params) == 392, "Hopper prefill in fp8");
