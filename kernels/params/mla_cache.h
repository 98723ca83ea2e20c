// The parameters of the kernels that write and read caches of latent records. src/cuda/mla_cache_params.rs mirrors
// them field by field; sizes are asserted on both sides. No code here.
#pragma once

#include "params/integers.h"

// The parts of records, each [page][token][element]; strides of heads are 0.
struct FolioRecords {
    FolioCache latent, rope;             // rope: null where records have none
    FolioCache scales;                   // fp8_ds_mla: fp32, one for each 128 latent elements; else null
    folio_u32 latent_dtype, rope_dtype;  // FolioDtype
};

// kernels/ops/mla_append.cu. A null q means no queries, a null cos_sin no rotation.
struct FolioMlaAppendParams {
    FolioRecords cache;
    FolioRows latent, rope;  // [token][element]; strides of heads are 0
    FolioRows rope_out;      // null: not wanted
    FolioRows q, q_out;      // [token][head][element]
    const void *cos_sin;     // [position][cosines, sines]
    folio_i64 cos_sin_stride, max_position;
    const void *positions, *slots;
    folio_i64 num_slots;
    FolioDivisor page_size;
    FolioDivisor rope_pieces;  // of up to 8 pairs, in a rotary row
    folio_u32 position_bytes, slot_bytes;
    folio_u32 rank, rope_dim, num_heads;
    folio_u32 dtype, cos_sin_dtype;  // FolioDtype
    folio_u32 is_interleaved;
    folio_u32 vectors;  // rows are 16-byte aligned and a multiple of 8 elements long; of 16 where they are rotated
    float k_scale;
};

// kernels/ops/mla_gather.cu.
struct FolioMlaGatherParams {
    FolioRecords cache;
    FolioRows dst, dst_rope;    // [row][element]; strides of heads are 0
    FolioIntegers cu_seq_lens;  // [batch_size + 1]
    FolioIntegers seq_starts;   // [batch_size] or null
    FolioIntegers page_indptr;  // [batch_size + 1]; null: a block table
    FolioIntegers page_ids;     // a list, or [batch_size][columns]
    folio_i64 num_rows;
    FolioDivisor page_size;
    folio_u32 batch_size, num_pages;  // num_pages: at most 2^31
    folio_u32 rank, rope_dim;
    folio_u32 dst_dtype;  // FolioDtype
    folio_u32 vectors;    // rows are 16-byte aligned and a multiple of 8 elements long
    float k_scale;
};

// The numbers of src/cuda/mla_cache_params.rs.
static_assert(sizeof(FolioRecords) == 104, "records");
static_assert(sizeof(FolioMlaAppendParams) == 336, "MLA append");
static_assert(sizeof(FolioMlaGatherParams) == 360, "MLA gather");
