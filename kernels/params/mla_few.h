// The parameters of kernels/sm90/mla_few. src/cuda/mla_few_params.rs mirrors them field by field; the size is asserted on
// both sides. No code here.
#pragma once

#include "params/mla.h"

struct FolioMlaFewParams {
    FolioMlaParams mla;
    folio_u32 kv_evict_first;  // the keys are few enough to pass through L2 without clearing it
    folio_u32 one_record;      // a token's rotary part follows its latent part: one copy brings both
    // Of the kernel that reads keys by tensor maps: 16 tokens are 1 << boxes_log2 boxes, and pages are so many groups
    // of 8 tokens apart.
    folio_u32 boxes_log2, page_step, rope_page_step, reserved;
};

// The number of src/cuda/mla_few_params.rs.
static_assert(sizeof(FolioMlaFewParams) == 512, "Hopper MLA of few rows");
