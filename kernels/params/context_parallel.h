// The parameters of the kernels of context parallelism. src/cuda/context_parallel_params.rs mirrors them field by field;
// sizes are asserted on both sides. No code here.
#pragma once

#include "params/params.h"

// kernels/ops/cp_reorder.cu. Strides are in bytes here.
struct FolioCpReorderParams {
    const void *gathered;  // [rank][row][byte]
    void *dst;             // [row][byte]
    folio_i64 gathered_stride_rank, gathered_stride_row, dst_stride_row;
    const folio_i32 *context_lens;    // [batch_size]
    const folio_i32 *cu_seq_lens;     // [batch_size + 1] rows of dst
    const folio_i32 *cu_padded_lens;  // [batch_size + 1] rows of a rank
    folio_i64 num_rows, rank_rows;    // that dst and a rank have
    folio_i64 local_start;
    folio_u32 batch_size, world_size, interleave;
    folio_u32 row_bytes,
        unit_bytes;  // a unit is copied at a time: 16 bytes where rows are aligned to them, else an element
    folio_u32 reserved;
};

// kernels/ops/cp_correct.cu.
struct FolioCpCorrectParams {
    const float *lse_all;
    folio_i64 lse_stride_rank, lse_stride_token, lse_stride_head;
    FolioRows o, o_out;
    float *lse_out;  // or null
    folio_i64 lse_out_stride_token, lse_out_stride_head;
    folio_i64 num_rows;  // (token, head) pairs
    FolioDivisor num_heads;
    folio_u32 rank, world_size, head_dim;
    folio_u32 dtype;    // FolioDtype of o
    folio_u32 flags;    // FolioRunFlag
    folio_u32 vectors;  // rows are 16-byte aligned and a multiple of 8 elements long
    folio_u32 reserved;
};

// The numbers of src/cuda/context_parallel_params.rs.
static_assert(sizeof(FolioCpReorderParams) == 112, "reordering");
static_assert(sizeof(FolioCpCorrectParams) == 152, "correction");
