// The parameters of the Hopper decode kernels beyond FolioDecodeParams: the problem's head dims, which may be less than
// those that a kernel is compiled for, and how its rows lie. src/cuda/params.rs mirrors both as one struct; sizes are
// asserted on both sides. No code here.
#pragma once

#include "params/params.h"

struct FolioPaddedDecodeParams : FolioDecodeParams {
    folio_u32 head_dim_qk, head_dim_vo;
    // Boxes that bring the rows of a page: 1, or one for each swizzle atom of a row, where a page is less than a tile of
    // keys or the last atom is not full.
    folio_u32 k_column_boxes, v_column_boxes;
    // For the gathering kernel: 16 where address and length of every row of k and v are multiples of it, otherwise less, and the
    // address is a multiple of 8.
    folio_u32 row_alignment;
    folio_u32 bf16_queries;  // over a cache of 8 bits or less: q has bf16, otherwise fp16, or fp8 by its flag
};

static_assert(sizeof(FolioPaddedDecodeParams) == 432, "mirrored in src/cuda/params.rs");
