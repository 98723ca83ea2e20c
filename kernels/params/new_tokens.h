// The parameters of the Hopper decode kernels that make queries and keys of new tokens themselves. src/cuda/new_tokens_params.rs
// mirrors them; sizes are asserted on both sides. No code here.
#pragma once

#include "params/decode.h"
#include "params/rope_append.h"

struct FolioNewTokensParams {
    FolioPaddedDecodeParams decode;  // its q is that of `rope`
    FolioRopeAppendParams rope;
};

static_assert(sizeof(FolioNewTokensParams) == 2904, "mirrored in src/cuda/new_tokens_params.rs");
