// The parameters of kernels/sm90/prefill. src/cuda/prefill_params.rs mirrors them field by field; the size is asserted on
// both sides. No code here.
#pragma once

#include "params/params.h"

// Query heads that share the rows of a warpgroup: row r of its 64 is position r / heads. Where 64 is no multiple, the last
// rows have none. A group is `group_blocks` blocks of such heads. Where it is no multiple of them, the last block begins with heads
// of the one before, which alone stores these.
struct FolioPacking {
    unsigned char heads;      // 1 to 64, at most a group
    unsigned char positions;  // 64 / heads
    unsigned short inverse;   // r / heads is r * inverse >> 15 for all rows of a warpgroup
};

// The flags of these kernels' runs have the type of o above all others, FolioDtype, so that a tile's end waits for one load. Their
// v_scale is divided by that of outputs in fp8.
enum { FOLIO_O_DTYPE_SHIFT = 16 };

struct FolioPrefillParams {
    FolioAttentionParams attention;  // first: who has these finds the packing
    // Of the problem, at most those that the kernel is compiled for. Rows of o and of partial results have head_dim_vo
    // columns; keys and values that are loaded row by row, so many.
    folio_u32 head_dim_qk, head_dim_vo;
    FolioPacking packing;
    // Of rows of k and v that are loaded one by one, in bytes: 8 or 16, of which their length is a multiple too.
    unsigned short row_alignment;
    // Where rows are converted: tokens of a box of a tensor map, by which they come, and whether it has all columns of these, or
    // 64. 0 tokens: rows come one by one.
    unsigned char raw_box_tokens, raw_boxes_of_rows;
    FolioDivisor page_size;
    unsigned short group_blocks, group_size;
    FolioSum sum;  // of runs over keys in two parts
    // Of these over ragged keys: [batch_size + 1] rows of tensors of their own, which a request has in front of its other keys.
    // The plan's lengths count them in whole steps of the kernel; ragged keys begin where query rows do. Null: there are none.
    const folio_i32 *context_indptr;
};

// The number of src/cuda/prefill_params.rs.
static_assert(sizeof(FolioPrefillParams) == 432, "Hopper prefill");
