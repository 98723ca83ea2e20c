// What host and device agree on for the projections of MLA: structs that src/cuda/projection_params.rs mirrors. Sizes
// are asserted on both sides. Strides are in elements.
#pragma once
#include "params/params.h"

// How the portable kernel reads a weight.
enum FolioWeightOrder {
    FOLIO_WEIGHT_DEPTH_FIRST = 0,    // 16 bytes along the depth, which has a unit stride
    FOLIO_WEIGHT_COLUMNS_FIRST = 1,  // 16 bytes along the columns, which have a unit stride
    FOLIO_WEIGHT_ELEMENTS = 2,       // one element after the other
};

// out[t, h] = x[t, h] weight[h], where x is [num_tokens, num_heads, depth] and weight[h] is [depth, columns]. Both
// widths are multiples of 8.
struct FolioProjectionParams {
    FolioRows x;  // stride_head is 0 where all heads share the rows
    const void *weight;
    folio_i64 weight_stride_head, weight_stride_depth, weight_stride_column;
    FolioRows out;
    folio_u32 num_tokens, num_heads, depth, columns;
    folio_u32 x_heads;  // 1 where all heads share the rows
    // The portable kernel's.
    folio_u32 x_vectors;     // rows are 16-byte aligned
    folio_u32 weight_order;  // FolioWeightOrder
    folio_u32 out_pairs;     // rows are 4-byte aligned
};

// kernels/ops/copy_weights.cu: target[h, row, column] = source[h, row, column].
struct FolioCopyWeightsParams {
    const void *source;
    void *target;
    folio_i64 source_stride_head, source_stride_row, source_stride_column;
    folio_i64 target_stride_head, target_stride_row, target_stride_column;
    folio_u32 num_heads, rows, columns, reserved;
};

// The numbers of src/cuda/projection_params.rs.
static_assert(sizeof(FolioProjectionParams) == 112, "projection");
static_assert(sizeof(FolioCopyWeightsParams) == 80, "copy of weights");
