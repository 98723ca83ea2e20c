// The parameters of the kernel that normalises, rotates and appends. src/cuda/rope_append_params.rs mirrors them field by
// field; sizes are asserted on both sides. No code here.
#pragma once

#include "params/params.h"

#define FOLIO_MOST_PAIRS 256

// kernels/ops/rope_append.cu. A null q means no queries, a null weight no norm, rotary_dim 0 no rotation.
struct FolioRopeAppendParams {
    FolioAppendParams append;
    FolioRows q, q_out;
    FolioRows key_out;  // null: not wanted
    const void *q_weight, *k_weight;
    const void *cos, *sin;  // [position][pair]; null: angles are computed
    folio_i64 cos_sin_stride, max_position;
    const void *positions, *offsets;  // offsets: or null
    folio_i64 num_q_rows;
    FolioDivisor units_of_token;  // what warps have of one: see the kernel
    folio_u32 log2_lanes;         // threads that share a row: 1 for each 16 elements, and a power of two up to 32
    folio_u32 num_q_heads, rotary_dim;
    folio_u32 position_bytes, offset_bytes;
    folio_u32 q_weight_dtype, k_weight_dtype, cos_sin_dtype;  // FolioDtype: fp32, or that of the tokens
    folio_u32 is_interleaved;
    folio_u32 vectors;  // rows of q and key are 16-byte aligned and a multiple of 8 elements long; of 16 where rotated
    float rms_norm_eps;
    unsigned long long turns[FOLIO_MOST_PAIRS];  // computed angles: turns of a pair per position, in 2^-64
};

// The numbers of src/cuda/rope_append_params.rs.
static_assert(sizeof(FolioRopeAppendParams) == 2472, "rope append");
