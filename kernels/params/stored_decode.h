// The parameters of the Hopper decode kernels over caches in other forms than rows of plain elements.
// src/cuda/stored_params.rs mirrors them; sizes are asserted on both sides. No code here.
#pragma once

#include "params/decode.h"
#include "params/stored.h"

struct FolioStoredDecodeParams : FolioPaddedDecodeParams {
    FolioStored cache;  // of whose tensors the scales and zero points are used
};

static_assert(sizeof(FolioStoredDecodeParams) == 648, "mirrored in src/cuda/stored_params.rs");
