// The parameters of kernels/widen/latent_queries.cu. src/cuda/latent_queries_params.rs mirrors them field by field; sizes are
// asserted on both sides. No code here.
#pragma once

#include "params/params.h"

struct FolioLatentQueriesParams {
    const folio_i32 *qo_indptr;  // of FolioPlanView
    const folio_u32 *counts;
    FolioRows q, q_rope;  // in fp8: [token][head][8 * pieces], [token][head][8 * rope_pieces]
    unsigned char *rows;  // of 16 bits: [token][head][8 * (pieces + rope_pieces)]
    FolioDivisor num_heads;
    folio_u32 num_tokens;  // that there is room for
    folio_u32 pieces, rope_pieces;
    folio_u32 q_dtype, row_dtype;  // FolioDtype
    folio_u32 is_aligned;          // all rows of q and q_rope begin at whole pieces
    folio_u32 reserved;
};

// The number of src/cuda/latent_queries_params.rs.
static_assert(sizeof(FolioLatentQueriesParams) == 112, "latent queries");
