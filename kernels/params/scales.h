// The parameters of kernels/ops/fold_scales.cu. src/cuda/scales_params.rs mirrors them field by field; sizes are asserted on
// both sides. No code here.
#pragma once

#include "params/params.h"

// A factor for each KV head of each request, or with a stride of 0 for all heads or requests. Null: 1.
struct FolioRowScales {
    const float *data;
    folio_u32 stride, request_stride;
};

struct FolioFoldScalesParams {
    FolioRowScales q, k, v;
    const float *o;        // a divisor, or null: 1
    float *k_out, *v_out;  // [num_requests][num_kv_heads]
    folio_u32 num_kv_heads;
    folio_u32 num_requests;  // 1 where no scale is a request's
};

// The numbers of src/cuda/scales_params.rs.
static_assert(sizeof(FolioRowScales) == 16 && sizeof(FolioFoldScalesParams) == 80, "scales");
