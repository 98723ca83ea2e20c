// The parameters of MLA kernels: one latent KV head, queries and keys in a latent and a rotary part.
// src/cuda/mla_params.rs mirrors them field by field; the size is asserted on both sides. No code here.
#pragma once

#include "params/params.h"

// A row of a tile is a (token, head) pair of a work item: row = token * num_heads + head.
struct FolioMlaParams {
    // q and o are [token][num_qo_heads][kv_lora_rank]. k, which is v too, is [page][token][0][kv_lora_rank], or the
    // records of an fp8_ds_mla cache as bytes. num_kv_heads is 1; v_scale holds k_scale, o_scale is 1.
    FolioAttentionParams attention;
    FolioRows q_rope;   // [token][num_qo_heads][qk_rope_head_dim]; null without a rotary part
    FolioCache k_rope;  // [page][token][0][qk_rope_head_dim]; null without one, or where it is part of the records
    folio_u32 kv_lora_rank, qk_rope_head_dim;
    folio_u32 o_dtype;    // FolioDtype
    folio_u32 row_tiles;  // row tiles that the largest item needs
    // Up to 16: what the address of every row is a multiple of.
    folio_u32 q_copy_bytes, q_rope_copy_bytes, k_copy_bytes, k_rope_copy_bytes;
    FolioDivisor page_size, num_heads;
};

// The number of src/cuda/mla_params.rs.
static_assert(sizeof(FolioMlaParams) == 488, "MLA");
