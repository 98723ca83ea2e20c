// The parameters of kernels/ops/mask_items.cu. src/cuda/items_params.rs mirrors them field by field; sizes are asserted on both
// sides. No code here.
#pragma once

#include "params/params.h"

struct FolioMaskItemsParams {
    const folio_i32 *qo_indptr, *kv_len;  // of FolioPlanView
    const folio_u32 *counts;
    const folio_i64 *mask_start;  // [batch_size] first byte of each request's mask, as the plan has them
    const folio_i64 *starts;      // [batch_size] the key that the first item begins with
    const folio_i32 *positions;   // [batch_size][columns] of the tokens from there on
    unsigned char *mask;          // FOLIO_MASK_BITS
    folio_i64 mask_bytes;         // that there is room for
    folio_i64 columns;
};

// The number of src/cuda/items_params.rs.
static_assert(sizeof(FolioMaskItemsParams) == 72, "items");
