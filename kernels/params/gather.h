// The parameters of the kernel that copies a cache's tokens to dense rows. src/cuda/gather_params.rs mirrors them field by
// field; sizes are asserted on both sides. No code here.
#pragma once

#include "params/integers.h"

// One of keys and values.
struct FolioGatheredTensor {
    FolioCache cache;
    FolioRows rows;
    const float *scales;  // of an fp8 cache, or null
    float scale;
    folio_i32 scales_stride;
    FolioDivisor head_pieces;  // of up to 8 elements, in a head's row
    folio_u32 head_dim;
};

// kernels/ops/gather.cu.
struct FolioKvGatherParams {
    FolioGatheredTensor k, v;
    FolioIntegers cu_seq_lens;  // [batch_size + 1]
    FolioIntegers seq_starts;   // [batch_size] or null
    FolioIntegers page_indptr;  // [batch_size + 1]; null: a block table
    FolioIntegers page_ids;     // a list, or [batch_size][columns]
    folio_i64 num_rows;
    FolioDivisor page_size;
    folio_u32 batch_size, num_pages;  // num_pages: at most 2^31
    folio_u32 num_kv_heads;
    folio_u32 cache_dtype, row_dtype;  // FolioDtype
    folio_u32 vectors;                 // rows are 16-byte aligned and a multiple of 8 elements long
    folio_u32 reserved;
};

// The numbers of src/cuda/gather_params.rs.
static_assert(sizeof(FolioGatheredTensor) == 88, "gathered tensor");
static_assert(sizeof(FolioKvGatherParams) == 384, "KV gather");
