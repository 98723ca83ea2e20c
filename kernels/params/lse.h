// The parameters of kernels/plan/round_lse.cu. src/cuda/lse_params.rs mirrors them field by field; sizes are asserted on both
// sides. No code here.
#pragma once

#include "params/params.h"

struct FolioRoundLseParams {
    const folio_i32 *qo_indptr;  // FolioPlanView::qo_indptr
    const folio_u32 *counts;     // FolioPlanView::counts
    const float *from;           // [token][num_heads], without gaps
    void *to;                    // [token][head]
    folio_i64 stride_token, stride_head;
    folio_u32 num_tokens;  // rows that both have
    folio_u32 num_heads;
    folio_u32 dtype;  // FolioDtype: FOLIO_F16 or FOLIO_BF16
    folio_u32 reserved;
};

// The number of src/cuda/lse_params.rs.
static_assert(sizeof(FolioRoundLseParams) == 64, "rounding of lse");
