// What host and device agree on for the up-projection of latent rows: a struct that src/cuda/up_projection_params.rs
// mirrors. Its size is asserted on both sides.
#pragma once
#include "params/params.h"

// The keys of all heads, or the values. Nothing is computed where `columns` is 0.
struct FolioUpProjectionPart {
    folio_u32 columns;      // of a head
    folio_u32 depth_first;  // the weight's depth has the unit stride and not its columns
};

// out[t, h] = x[t] weight[h] of both parts, where x is [num_tokens, depth] and weight[h] is [depth, columns].
struct FolioUpProjectionParams {
    const folio_i32 *existing_tokens;  // how many of the tokens are looked at, unchecked; all of them where it is null
    folio_u32 num_tokens, num_heads, depth, reserved;
    FolioUpProjectionPart keys, values;
};

static_assert(sizeof(FolioUpProjectionParams) == 40, "up-projection");
