// The parameters of kernels/sm90/widen. src/cuda/widen_params.rs mirrors them field by field; the size is asserted on both
// sides. No code here.
#pragma once

#include "params/params.h"

// Keys of a request in rows that are widened begin at multiples of so many.
#define FOLIO_WIDENED_ROWS 32

struct FolioWidenParams {
    FolioPlanView plan;
    FolioCache k, v;        // fp8
    void *k_rows, *v_rows;  // [most_rows][num_kv_heads][dim], of 16-bit elements
    // [batch_size + 1], and the first entry of page_ids (ragged: row) of each request that has rows.
    folio_i32 *first_row;
    folio_i64 *page_start;
    FolioWorkItem *items;  // the plan's, whose page_start is the first of the widened rows
    FolioDivisor page_size, num_kv_heads;
    folio_u32 k_pieces, v_pieces;  // of 8 elements, of a row
    folio_u32 num_pages;           // that k and v have; ragged: rows
    folio_u32 most_rows;
    folio_i32 window_left;             // keys before the window of a request's first row are left out; -1: none
    folio_u32 cache_dtype, row_dtype;  // FolioDtype
    folio_u32 reserved;
};

// The number of src/cuda/widen_params.rs.
static_assert(sizeof(FolioWidenParams) == 240, "widening");
