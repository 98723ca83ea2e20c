// The parameters of kernels/plan/plan.cu, and those that it has in common with plan_cascade.cu. src/cuda/plan_params.rs mirrors
// them field by field; sizes are asserted on both sides. No code here.
#pragma once

#include "params/params.h"

// In which order items stand. By request: those of a request together, which is prefill. By share: where the batch is cut into
// shares that workers take whole, see FolioPlanView::counts.
enum FolioPlanOrder { FOLIO_PLAN_BY_COST = 0, FOLIO_PLAN_BY_REQUEST = 1, FOLIO_PLAN_BY_SHARE = 2 };

// What kernels/plan/plan.cu keeps of a request.
struct FolioPlanRequest {
    folio_i64 page_start;
    folio_u32 rows, keys;
    union {
        folio_u32 units;      // of those keys that have items
        folio_u32 first_cut;  // as soon as the cut is known: units before the second piece
    };
    union {
        folio_u32 units_before;  // of the requests before it, counted once each
        folio_u32 pieces;        // as soon as the cut is known: of each of its tiles
    };
    union {
        folio_u32 tiles_before;   // of the requests before it
        folio_u32 first_partial;  // as soon as the cut is known
    };
    folio_i32 q_token;
};

// Cuts a batch whose lengths are on the device, as src/plan/schedule.rs does on the host.
struct FolioPlanParams {
    const folio_i32 *qo_indptr;  // or null: fixed_qo_len rows per request
    const folio_i32 *kv_indptr;  // pages (ragged: tokens) before each request, or null
    const folio_i32 *kv_len;     // or null: from kv_indptr and last_page_len
    const folio_i32 *last_page_len;
    folio_i64 table_stride;  // block table: elements from row to row
    folio_i64 num_page_ids;  // of kv_indices; block table: columns; ragged: more than any batch has
    folio_i32 *out_qo_indptr, *out_kv_len;
    folio_i64 *out_mask_bytes_start, *out_mask_bits_start;
    FolioPlanRequest *requests;  // [batch_size], and as many u32: for the kernel itself
    folio_u32 *first_item, *first_combine;
    FolioWorkItem *items;
    FolioCombineItem *combines;
    folio_u32 *partials;
    folio_u32 *counts, *next_tile;
    const folio_u32 *decode_counts;  // of prompts; or null
    FolioDivisor q_tile;
    folio_u32 batch_size, fixed_qo_len, page_size;
    folio_u32 kv_unit, max_splits, invariant_chunk;   // invariant_chunk 0: balance the batch
    folio_u32 max_shares, least_gain, combine_units;  // as those of `Tiling`
    folio_i32 window_left;                            // no row sees further; -1: unlimited
    folio_u32 max_qo_len, max_kv_len, max_num_tokens, max_items, max_combines, max_partial_rows;
    // A batch in two plans (0: one): decodes are the requests of up to so many rows, and are planned where they have so many
    // units of keys together. The plan of the prompts reads the counts of theirs, and has all requests where theirs has none.
    folio_u32 decode_rows, least_units;
    folio_u32 order;  // FolioPlanOrder
};

// Workers of an item, and requests that may be one item each: the tiles of its rows, pairs of a query row and a head, have a
// worker each.
struct FolioPlanWorkers {
    folio_u32 of_item;    // of q_tile query rows
    folio_u32 most_rows;  // query rows of a request that is one item, at most; 0: requests are cut by q_tile
    folio_u32 num_heads, rows_of_tile, all;
    folio_u32 rows_of_unit;  // as that of `Tiling`
};

// What it takes to cut the last tiles of a prefill: src/problem/work.rs, `TailCosts`.
struct FolioPlanTail {
    folio_u32 most_chunks;  // of all cut tiles; 0: none is cut
    folio_u32 item_units, combine_units, least_gain;
    float units_of_row;  // in the time in which a row of partial results is written and read
    folio_u32 reserved;
};

enum { FOLIO_NARROW_TILES = 2 };

// Tiles of fewer query rows, the narrowest first, for batches whose tiles all run at a time and whose keys are not cut.
struct FolioPlanNarrow {
    FolioDivisor q_tile[FOLIO_NARROW_TILES];
    folio_u32 count, at_a_time;
    folio_u32 least_gain;  // in place of the plan's, where tiles could be narrow
    folio_u32 reserved;
};

struct FolioPlanBatchParams {
    FolioPlanParams plan;
    FolioPlanWorkers workers;
    FolioPlanTail tail;
    FolioPlanNarrow narrow;
};

// The numbers of src/cuda/plan_params.rs.
static_assert(sizeof(FolioPlanRequest) == 32 && sizeof(FolioPlanParams) == 240, "planning");
static_assert(sizeof(FolioPlanBatchParams) == 328, "planning a batch");
