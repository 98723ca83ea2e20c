// The parameters of kernels/sm90/prefill_fp8. src/cuda/prefill_fp8_params.rs mirrors them field by field; the size is
// asserted on both sides. No code here.
#pragma once

#include "params/params.h"

// Strides of a cache in pieces of 16 bytes, where rows are copied one by one.
struct FolioPieces {
    folio_u32 page, token, head;
    folio_u32 head_dim;  // of a row, in elements
};

struct FolioPrefillFp8Params {
    FolioAttentionParams attention;
    folio_u32 o_dtype;      // FolioDtype
    folio_u32 page_groups;  // groups of 8 tokens from page to page, of k as of v
    folio_u32 head_dim_vo;  // of a row of o, where a tile has more columns
    FolioPieces k, v;
    FolioDivisor page_size;
};

// The number of src/cuda/prefill_fp8_params.rs.
static_assert(sizeof(FolioPrefillFp8Params) == 432, "Hopper prefill in fp8");
