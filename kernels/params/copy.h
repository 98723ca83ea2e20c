// The parameters of the kernels that copy pages. src/cuda/copy_params.rs mirrors them field by field; sizes are asserted
// on both sides. No code here.
#pragma once

#include "params/params.h"

// Where pages of one kind come from, and where they go. Strides are in bytes.
struct FolioPagesToCopy {
    const void *src;
    void *dst;
    folio_i64 src_stride, dst_stride;
    folio_i64 page_bytes;
    folio_u32 pieces;  // of a page, that a warp copies at a time; 0: nothing is copied
    folio_u32 reserved;
};

// kernels/ops/copy.cu.
struct FolioKvCopyParams {
    FolioPagesToCopy k, v;
    const void *pairs;     // [n][src page, dst page], of integers of pair_bytes / 2; null: they are in FolioKvCopyList
    folio_u32 num_pieces;  // of all pairs
    FolioDivisor pair_pieces;  // of k and v together
    folio_u32 src_pages, dst_pages;
    folio_u32 pair_bytes;
    folio_u32 unit_bytes;  // what a lane moves at a time: 16 where all pages are aligned to them, else 4, 2 or 1
};

#define FOLIO_KV_COPY_PAIRS 480

// Pairs of the host, within the 4 KiB that a kernel's parameters have.
struct FolioKvCopyList {
    FolioKvCopyParams copy;
    folio_i32 pairs[2 * FOLIO_KV_COPY_PAIRS];
};

// The numbers of src/cuda/copy_params.rs.
static_assert(sizeof(FolioPagesToCopy) == 48, "pages");
static_assert(sizeof(FolioKvCopyParams) == 136, "copy");
static_assert(sizeof(FolioKvCopyList) == 3976, "copy by a list");
