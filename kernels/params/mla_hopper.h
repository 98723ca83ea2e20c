// The parameters of the Hopper MLA kernel: those of every MLA kernel, and how tensor maps cut a cache into boxes.
// src/cuda/mla_params.rs mirrors them field by field; the size is asserted on both sides. No code here.
#pragma once

#include "params/mla.h"

struct FolioMlaHopperParams {
    FolioMlaParams mla;
    folio_u32 box_log2;       // a box is 1 << box_log2 groups of 8 tokens: 1 or 2
    folio_u32 whole_records;  // the rotary part of a record is behind its latent one: one map has both
};

// The number of src/cuda/mla_params.rs.
static_assert(sizeof(FolioMlaHopperParams) == 496, "Hopper MLA");
