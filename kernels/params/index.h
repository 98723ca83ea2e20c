// The parameters of the kernels that build a batch's indices. src/cuda/index_params.rs mirrors them field by field; sizes
// are asserted on both sides. No code here.
#pragma once

#include "params/integers.h"

// Where the tokens of requests are.
struct FolioTokenRows {
    FolioIntegers table;    // [row][column] page ids
    FolioIntegers row_ids;  // [request]; or null: its own number
    FolioDivisor page_size;
    folio_u32 reserved;
};

// kernels/ops/batch_lengths.cu. Outputs may be null.
struct FolioBatchLengthsParams {
    FolioIntegers qo_len, cached_len, encoder_len;  // [batch_size], the latter two or null
    FolioIntegers qo_indptr, kv_len, kv_indptr, row_kind;
    folio_u32 batch_size, reserved;
};

// kernels/ops/kv_indices.cu.
struct FolioKvIndicesParams {
    FolioTokenRows rows;
    FolioIntegers kv_len, kv_start;                      // [batch_size], the latter or null
    FolioIntegers kv_indptr, kv_indices, last_page_len;  // the last one or null
    FolioDivisor page_size;                              // tokens per index
    folio_u32 window;                                    // 0: none
    FolioDivisor parts;                                  // blocks of a group of requests
    folio_u32 batch_size;
};

// kernels/ops/block_table.cu.
struct FolioBlockTableParams {
    FolioIntegers kv_indptr, kv_indices, block_table;
    folio_i32 fill;
    folio_u32 batch_size, parts;  // warps of a row
    folio_u32 reserved;
};

// kernels/ops/slot_mapping.cu.
struct FolioSlotMappingParams {
    FolioTokenRows rows;
    FolioIntegers qo_indptr, qo_len;                // one of them null
    FolioIntegers kv_len, slot_mapping, positions;  // the last one or null
    folio_u32 batch_size, reserved;
};

// src/problem/index.rs: DraftSlots.
enum FolioDraftSlots { FOLIO_DRAFT_STEP_MAJOR = 0, FOLIO_DRAFT_BRANCH_MAJOR = 1, FOLIO_DRAFT_PAGED = 2 };

// kernels/ops/draft_kv_indices.cu.
struct FolioDraftKvIndicesParams {
    FolioTokenRows rows;  // of slots
    FolioIntegers kv_len, kv_indptr, kv_indices;
    folio_u32 batch_size, topk;
    folio_u32 num_steps;    // that branches have slots for
    folio_u32 slot_layout;  // FolioDraftSlots
    folio_u32 page_size;
    FolioDivisor blocks, parts;  // of a step, and of a group of requests
    folio_u32 reserved;
};

// The numbers of src/cuda/index_params.rs.
static_assert(sizeof(FolioTokenRows) == 96, "rows");
static_assert(sizeof(FolioBatchLengthsParams) == 288, "lengths");
static_assert(sizeof(FolioKvIndicesParams) == 328, "lists");
static_assert(sizeof(FolioBlockTableParams) == 136, "tables");
static_assert(sizeof(FolioSlotMappingParams) == 304, "slots");
static_assert(sizeof(FolioDraftKvIndicesParams) == 264, "drafts");
