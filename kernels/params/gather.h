// The parameters of the kernel that copies a cache's tokens to dense rows. src/cuda/gather_params.rs mirrors them field by
// field; sizes are asserted on both sides. No code here.
#pragma once

#include "params/params.h"

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
    const folio_i32 *cu_seq_lens;  // [batch_size + 1]
    const folio_i32 *seq_starts;   // [batch_size] or null
    const folio_i32 *page_indptr;  // [batch_size + 1]; null: a block table
    const folio_i32 *page_ids;
    folio_i64 table_stride;  // block table: elements from row to row
    folio_i64 num_page_ids;  // of kv_indices; block table: columns
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
static_assert(sizeof(FolioKvGatherParams) == 272, "KV gather");
