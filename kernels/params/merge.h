// The parameters of the merges that ask for more than FolioMergeStatesParams says. src/cuda/merge_params.rs mirrors
// them field by field; sizes are asserted on both sides. No code here.
#pragma once

#include "params/params.h"

// kernels/ops/merge.cu.
struct FolioMergeGeneralParams {
    FolioMergeStatesParams merge;  // with indptr, num_states are all that there are, at v_stride_state from each other
    const folio_i32 *indptr;       // [num_tokens + 1] first state of each token, unchecked; or null
    folio_i64 num_tokens_with_first;  // two states: tokens from here on have the second alone
    float o_factor;                   // 1 / o_scale
    folio_u32 o_dtype;                // FolioDtype of v_out
    folio_u32 s_dtype, s_out_dtype;   // of every s of the states, and of s_out: FOLIO_F32, FOLIO_F16 or FOLIO_BF16
};

// The number of src/cuda/merge_params.rs.
static_assert(sizeof(FolioMergeGeneralParams) == 264, "general merges");
