// What the two Hopper MLA kernels of 64 rows have in common: the atoms that records lie in, the work items of a CTA, its
// rows of an item, and where their results go. No loads of keys and no arithmetic here.
#pragma once

#include "core/mask.cuh"
#include "core/paged.cuh"
#include "core/softmax.cuh"
#include "params/mla_hopper.h"
#include "ptx/bulk.cuh"
#include "ptx/wgmma_products.cuh"

namespace folio::mla {

using Element = FOLIO_Q;  // of queries and of the output

// Of queries, keys and weights as they are multiplied. Every fp8 value is one of fp16, which an instruction makes of two
// bytes; for bf16 it takes five. Values of fp8_ds_mla have a scale, which needs the range of bf16.
template <bool FP8>
struct OperandOf {
    using Type = Element;
};
template <>
struct OperandOf<true> {
    using Type = f16;
};
#if FOLIO_DS_MLA
using Operand = Element;
#else
using Operand = OperandOf<FOLIO_KV::IS_FP8>::Type;
#endif

constexpr int RANK = FOLIO_HEAD_DIM_VO, ROPE = FOLIO_HEAD_DIM_QK - RANK;
constexpr int ROWS = FOLIO_Q_TILE, KEYS = FOLIO_KV_TILE;
static_assert(RANK == 512 && ROPE == 64 && ROWS == 64, "the registers are counted for these");

// Records lie in groups of 8 tokens. A group is nine swizzled atoms of 8 tokens x 128 bytes: eight latent ones and then
// the rotary one. Once scores are computed nobody needs the rotary atoms: the weights of the group's keys take their
// place.
constexpr int ATOM = 1024, GROUP = 8, GROUPS = KEYS / GROUP, LATENT_ATOMS = RANK / 64;
constexpr int ROPE_OFFSET = LATENT_ATOMS * ATOM, GROUP_BYTES = ROPE_OFFSET + ATOM, STAGE_BYTES = GROUPS * GROUP_BYTES;

// What the warpgroups tell each other of a stage.
struct StageRows {
    float scale[ROWS];    // of what was summed before this tile, where its warp has `rescale` set
    float inverse[ROWS];  // the last tile of an item: 1 / sum of weights
    u32 rescale[4];       // for each warp's 16 rows
};

// Barriers of the stages: so many arrivals say that one is filled, a warp of the scores each that its weights are there, and
// so many that it is free again.
template <class Shared>
__device__ __forceinline__ void make_barriers(Shared &shared, u32 filling, u32 releasing) {
    for (u32 i = 0; i < sizeof(shared.filled) / sizeof(u64); ++i) {
        mbarrier_init(shared_address(&shared.filled[i]), filling);
        mbarrier_init(shared_address(&shared.weighted[i]), 4);
        mbarrier_init(shared_address(&shared.released[i]), releasing);
    }
    mbarrier_init_fence();
}

// Where the rows of an item go: what a warpgroup keeps of a RowTile while its operands and sums fill the registers. Every
// thread writes it, and reads what it wrote itself: its fellows wrote the same.
struct OutputRows {
    u32 first_row, num_rows, first_token;  // of the partial results, or of the batch
    bool is_partial;

    __device__ __forceinline__ u32 token(const FolioMlaHopperParams &p, u32 row) const {
        return divide(first_row + row, p.mla.num_heads);
    }
    __device__ __forceinline__ u32 head(const FolioMlaHopperParams &p, u32 row, u32 token) const {
        return first_row + row - token * p.mla.num_heads.divisor;
    }
};

// The team that a CTA is in. A team has a CTA for each row tile of the largest item: they have the same items, and different
// rows. CTAs that are too few for a team are in one behind the last.
struct Team {
    u32 row_tile;  // the CTA's
    u32 number, count;

    // Where batches of a graph differ in their rows, or only the device knows these, the plan has the number of tiles.
    static __device__ __forceinline__ Team of_block(const FolioMlaHopperParams &p) {
        const u32 tiles =
            p.mla.row_tiles > 0 ? p.mla.row_tiles : max(p.mla.attention.plan.counts[FOLIO_COUNT_WORKERS_OF_ITEM], 1u);
        return {blockIdx.x % tiles, blockIdx.x / tiles, gridDim.x / tiles};
    }
};

// The rows of this CTA in one work item, and the keys that they see.
struct RowTile {
    u32 first_row, num_rows;  // among the item's q_len x num_heads
    u32 q_token, partial;     // of the item's first row
    i32 position;             // of the item's first token
    i32 begin, end;           // keys that any of the rows sees
    i64 page_start;

    __device__ __forceinline__ RowTile(const FolioMlaHopperParams &p, const Team &team, u32 index) {
        const FolioAttentionParams &a = p.mla.attention;
        const uint4 *words = reinterpret_cast<const uint4 *>(a.plan.items + index);
        const uint4 x = words[0], y = words[1], z = words[2];
        page_start = static_cast<i64>(static_cast<u64>(z.y) << 32 | z.x);
        q_token = z.z, position = static_cast<i32>(z.w), partial = y.y;
        begin = static_cast<i32>(x.w), end = static_cast<i32>(y.x);
        first_row = team.row_tile * ROWS;
        const u32 rows = existing_rows(a, q_token, x.z) * a.num_qo_heads;
        num_rows = rows <= first_row ? 0 : min(rows - first_row, static_cast<u32>(ROWS));
        if (num_rows > 0) end = begin + row_end(p, num_rows - 1);
    }

    __device__ __forceinline__ u32 token(const FolioMlaHopperParams &p, u32 row) const {
        return divide(first_row + row, p.mla.num_heads);
    }

    __device__ __forceinline__ u32 head(const FolioMlaHopperParams &p, u32 row, u32 token) const {
        return first_row + row - token * p.mla.num_heads.divisor;
    }

    // Keys that the row sees: they are the item's first ones.
    __device__ __forceinline__ i32 row_end(const FolioMlaHopperParams &p, u32 row) const {
        i32 last = end;
        if (p.mla.attention.mask_mode == FOLIO_MASK_CAUSAL) {
            last = min(last, position + static_cast<i32>(token(p, row)) + 1);
        }
        return max(last - begin, 0);
    }

    __device__ __forceinline__ i32 num_keys() const { return end - begin; }

    __device__ __forceinline__ OutputRows outputs() const {
        const bool is_partial = partial != FOLIO_NO_PARTIAL;
        return {first_row, num_rows, is_partial ? partial : q_token, is_partial};
    }
};

// An item, and where in the CTA's items it is: how many rounds or shares were done before.
struct ItemPosition {
    u32 index, done;
};

// The work items of a team. The first one, if there is any, is that of the team's number, so that it is read before the plan's
// counts are known. Then there are two ways:
//
// A batch that is cut into equal shares: a team has the items of a share, then those of the share that is as many further as
// there are teams. The first items of all shares are first in the list; behind the counts stands where the others are.
//
// Else items are sorted by their cost, the largest first, and dealt out in rounds. Every other round goes backwards, so that a
// team that got a large one next gets a small one.
class Items {
    static constexpr u32 NONE = 0xffffffff;

public:
    __device__ __forceinline__ Items(const FolioMlaHopperParams &p, const Team &team)
        : Items(p, team, {team.number, 0}) {
        // There may be fewer shares than teams.
        if (team.number >= team.count || (counts[FOLIO_COUNT_SHARES] > 0 && team.number >= counts[FOLIO_COUNT_SHARES]))
            at.index = NONE;
    }
    __device__ __forceinline__ Items(const FolioMlaHopperParams &p, const Team &team, ItemPosition at)
        : counts(p.mla.attention.plan.counts), team(team), at(at) {}

    __device__ __forceinline__ u32 index() const { return at.index; }
    __device__ __forceinline__ bool any() const { return at.index < counts[FOLIO_COUNT_ITEMS]; }
    __device__ __forceinline__ ItemPosition position() const { return at; }

    __device__ __forceinline__ void next() {
        const u32 shares = counts[FOLIO_COUNT_SHARES];
        if (shares == 0) {
            ++at.done;
            at.index = at.done * team.count + (at.done & 1 ? team.count - 1 - team.number : team.number);
            return;
        }
        const u32 share = team.number + at.done * team.count;
        at.index = at.index == share ? counts[FOLIO_NUM_COUNTS + share] : at.index + 1;
        if (at.index < counts[FOLIO_NUM_COUNTS + share + 1]) return;
        ++at.done;
        at.index = share + team.count < shares ? share + team.count : NONE;
    }

private:
    const u32 *counts;
    const Team &team;
    ItemPosition at;
};

// Calls attend(items) at each item.
template <class Attend>
__device__ __forceinline__ void for_each_item(const FolioMlaHopperParams &p, const Team &team, Attend attend) {
#pragma unroll 1
    for (Items items(p, team); items.any(); items.next()) attend(items);
}

// Moves on to the first item in which the CTA's rows see keys, and calls found(its rows); false where there is none.
template <class Found>
__device__ __forceinline__ bool find_keys(const FolioMlaHopperParams &p, const Team &team, Items &items, Found found) {
    for (; items.any(); items.next()) {
        const RowTile tile(p, team, items.index());
        if (tile.num_rows == 0 || tile.num_keys() == 0) continue;
        found(tile);
        return true;
    }
    return false;
}

// Which of the stages a role is at, and the phase of its barriers, from the number of tiles before.
template <int STAGES>
struct TurnOf {
    u32 tiles = 0;

    __device__ __forceinline__ u32 stage() const { return tiles % STAGES; }
    __device__ __forceinline__ u32 parity() const { return tiles / STAGES & 1; }
};

// Read anew where it is used, so that what is derived from it occupies no registers in between.
__device__ __forceinline__ u32 thread_of_block() {
    u32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
__device__ __forceinline__ u32 thread_of_warpgroup() { return thread_of_block() & 127; }

}  // namespace folio::mla
