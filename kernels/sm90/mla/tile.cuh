// The stages of the Hopper MLA kernels of three warpgroups that multiply, and what these share of them. No loads of keys and
// no arithmetic here.
#pragma once

#include "sm90/mla/rows.cuh"

namespace folio::mla {

// A warpgroup beside these three that loads takes registers. Then fewer keys are a tile, and fewer of the nine column tiles
// of the queries are in registers.
static_assert(KEYS == 48 || KEYS == 32, "the registers are counted for these");
constexpr int STAGES = KEYS == 48 ? 4 : 5;
constexpr int REGISTER_ATOMS = KEYS == 48 ? 8 : 7, SHARED_ATOMS = LATENT_ATOMS + 1 - REGISTER_ATOMS;
constexpr int QUERY_ATOM_BYTES = ROWS * 128;

using Turn = TurnOf<STAGES>;

struct alignas(1024) Shared {
    u8 stages[STAGES][STAGE_BYTES];
    u8 queries[SHARED_ATOMS][QUERY_ATOM_BYTES];  // the last column tiles
    u64 filled[STAGES];                          // by who loads
    u64 weighted[STAGES];                        // by the warps of the scores: weights are in place of the rotary atoms
    u64 released[STAGES];                        // by the halves of the outputs, but for one whose warpgroup loads
    StageRows rows[STAGES];
    OutputRows outputs[3];  // for each warpgroup
    i32 unseen[ROWS];       // how many of the item's last keys a row does not see
    i32 hidden_below;       // keys left of the item, below which some row does not see all of the next tile
    // Of the item whose keys are being loaded: its page ids, the end of its keys, and where it is among the CTA's.
    i64 page_start;
    i32 end;
    ItemPosition item;
    Team team;
};
static_assert(sizeof(Shared) <= FOLIO_SHARED_BYTES, "the row's shared memory");

}  // namespace folio::mla
