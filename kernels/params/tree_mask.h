// The parameters of the kernel of trees of draft tokens. src/cuda/tree_mask_params.rs mirrors them field by field; sizes
// are asserted on both sides. No code here.
#pragma once

#include "params/params.h"

// FolioTreeMaskParams.wide: outputs of int64; others are of int32.
enum FolioTreeMaskWide {
    FOLIO_TREE_WIDE_POSITIONS = 1,
    FOLIO_TREE_WIDE_NEXT_TOKEN = 2,
    FOLIO_TREE_WIDE_NEXT_SIBLING = 4,
};

// kernels/ops/tree_mask.cu. Outputs may be null.
struct FolioTreeMaskParams {
    const folio_i32 *parents;      // [num_tokens]
    const folio_i32 *prefix_lens;  // [batch_size]
    const folio_i32 *qo_indptr;    // [batch_size + 1], or null: every tree has tree_size tokens
    unsigned char *mask_bytes, *mask_bits, *tree_mask;
    unsigned char *tree_bits;                     // [num_tokens][row_bytes]
    void *positions, *next_token, *next_sibling;  // [num_tokens]
    folio_i64 bytes_room, bits_room, tree_room;   // bytes of the three masks
    folio_u32 num_tokens, batch_size, tree_size, row_bytes;
    folio_u32 wide;   // FolioTreeMaskWide
    folio_u32 parts;  // blocks of a tree
};

// The numbers of src/cuda/tree_mask_params.rs.
static_assert(sizeof(FolioTreeMaskParams) == 128, "tree masks");
