// The stages of the Hopper MLA kernel that takes records apart, and what its warpgroups share of them. No loads of keys and
// no arithmetic here.
#pragma once

#include "sm90/mla/rows.cuh"

namespace folio::mla {

constexpr int STAGES = 2;
static_assert(KEYS == 64, "the registers are counted for it");

using Turn = TurnOf<STAGES>;

// Swizzled atoms of 64 rows x 64 columns; the last one is rotary.
constexpr int QUERY_ATOM_BYTES = ROWS * 128;

struct alignas(1024) Shared {
    u8 stages[STAGES][STAGE_BYTES];
    u8 queries[LATENT_ATOMS + 1][QUERY_ATOM_BYTES];
    u64 filled[STAGES];
    u64 weighted[STAGES];  // by the warps of the scores: weights are in place of the rotary atoms
    u64 released[STAGES];  // by the warps of both halves of the outputs
    StageRows rows[STAGES];
    OutputRows outputs[2];  // for each half
    float powers[ROWS];     // by which queries were divided
    i32 unseen[ROWS];       // how many of the item's last keys a row does not see
    Team team;
};
static_assert(sizeof(Shared) <= FOLIO_SHARED_BYTES, "the row's shared memory");

}  // namespace folio::mla
