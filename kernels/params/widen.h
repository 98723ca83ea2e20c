// The parameters of kernels/widen. src/cuda/widen_params.rs mirrors them field by field; the sizes are asserted on both
// sides. No code here.
#pragma once

#include "params/params.h"

// Keys of a request in rows that are widened begin at multiples of so many.
#define FOLIO_WIDENED_ROWS 32

struct FolioWidenParams {
    FolioPlanView plan;
    FolioRows q;            // fp8
    FolioCache k, v;        // fp8, or of the rows' type
    void *q_rows;           // [tokens][num_qo_heads][dim] of fp16, where q is fp8
    void *k_rows, *v_rows;  // [most_rows][num_kv_heads][dim], of 16-bit elements
    // [batch_size + 1], and the first entry of page_ids (ragged: row) of each request that has rows.
    folio_i32 *first_row;
    folio_i64 *page_start;
    FolioWorkItem *items;  // the plan's, whose page_start is the first of the widened rows
    FolioDivisor page_size, num_qo_heads, num_kv_heads;
    folio_u32 k_pieces, v_pieces;  // of 8 elements, of a row
    folio_u32 num_pages;           // that k and v have; ragged: rows
    folio_u32 most_rows;
    folio_u32 num_tokens;                       // that q has, and q_rows has room for
    folio_u32 q_dtype, cache_dtype, row_dtype;  // FolioDtype
    folio_u32 num_units;
    folio_u32 new_keys_apart;  // the keys of a request's own rows are not in the cache
    folio_u32 reserved;
    float *units;  // that the first launch sets to the least
};

// The number of src/cuda/widen_params.rs.
static_assert(sizeof(FolioWidenParams) == 304, "widening");
