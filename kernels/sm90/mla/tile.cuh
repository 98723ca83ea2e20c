// The stages of the Hopper MLA kernel that loads records in boxes, and what its warpgroups share of them. No loads of keys
// and no arithmetic here.
#pragma once

#include "sm90/mla/rows.cuh"

namespace folio::mla {

constexpr int STAGES = 4;
static_assert(KEYS == 48, "the registers are counted for it");

using Turn = TurnOf<STAGES>;

struct alignas(1024) Shared {
    u8 stages[STAGES][STAGE_BYTES];
    u8 rope_queries[ROWS * ROPE * 2];
    u64 filled[STAGES];    // by TMA
    u64 weighted[STAGES];  // by the warps of the scores: weights are in place of the rotary atoms
    u64 released[STAGES];  // by the first half of the outputs
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
