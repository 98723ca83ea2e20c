// Tiles whose warpgroups have keys of their own. Small items, whose rows one warpgroup has room for, would leave the others
// idle, and a tile of few steps is mostly its beginning and its end. So several KV heads of such an item are one tile, a
// head for each warpgroup: the same pages, as many steps, and stages that follow one another in the ring.
//
// Every warpgroup has a record of a tile, about its own rows only. All that is different where keys are common to a tile
// is behind the functions and types of this file.
#pragma once

#include "sm90/prefill/order.cuh"

namespace folio::prefill {

// The record of a tile for one warpgroup: of its rows, that of a tile without others.
template <class Tile>
__device__ __forceinline__ Tile record_of(const Tile &tile, u32 group) {
    Tile own = tile;
    if constexpr (OWN_KEYS) {
        if (tile.key_sets == 1) {
            const u32 positions = tile.group_positions(), before = group * positions;
            own.token += before;
            own.position += static_cast<int>(before);
            own.num_tokens = before < tile.num_tokens ? min(tile.num_tokens - before, positions) : 0;
            if (tile.partial != FOLIO_NO_PARTIAL) own.partial += before;
        } else {
            own.head += group * tile.packing.heads;
            own.kv_head += group;
            if (group >= tile.key_sets) own.num_tokens = 0;
        }
    }
    return own;
}

// The other items, as TileOrder has them, and behind those the small ones, which the plan puts last and counts: as many heads
// in a tile as it takes for all tiles to run at a time, up to one for each warpgroup.
template <class Tile>
class SmallItemsOrder {
public:
    __device__ __forceinline__ explicit SmallItemsOrder(const FolioPrefillParams &params)
        : small(params.attention.plan.counts[FOLIO_COUNT_SMALL_ITEMS]),
          large(params, params.attention.plan.counts[FOLIO_COUNT_ITEMS] - small, 0),
          num_heads(TileOrder::head_blocks(params)) {
        tiles_of_item = num_heads;
#pragma unroll
        for (u32 heads = 2; heads <= CONSUMERS; ++heads) {
            if (num_tiles() > gridDim.x) tiles_of_item = (num_heads + heads - 1) / heads;
        }
    }

    __device__ __forceinline__ u32 num_tiles() const { return large.num_tiles() + small * tiles_of_item; }

    __device__ __forceinline__ Tile tile(const FolioPrefillParams &params, u32 index) const {
        if (index < large.num_tiles()) {
            Tile tile = large.tile(params, index);
            tile.key_sets = 1;
            return tile;
        }
        const u32 of_small = index - large.num_tiles(), item = of_small / tiles_of_item;
        const u32 heads = (num_heads + tiles_of_item - 1) / tiles_of_item;
        const u32 first = (of_small - item * tiles_of_item) * heads;
        Tile tile = make_tile(params, params.attention.plan.counts[FOLIO_COUNT_ITEMS] - small + item, first);
        tile.key_sets = min(heads, num_heads - first);
        return tile;
    }

private:
    u32 small;
    TileOrder large;
    u32 num_heads, tiles_of_item;
};

template <bool OWN_KEYS>
struct OrderOf {
    using Type = TileOrder;
};
template <>
struct OrderOf<true> {
    using Type = SmallItemsOrder<Tile>;
};
using Order = OrderOf<OWN_KEYS>::Type;

// Which stages of a tile are a warpgroup's.
template <bool OWN_KEYS>
struct TurnOf {
    TurnOf() = default;
    template <class Tile>
    __device__ __forceinline__ TurnOf(const Tile &, u32) {}

    // The warpgroup has keys, and nobody else has them.
    static constexpr __device__ __forceinline__ bool alone() { return false; }
    static constexpr __device__ __forceinline__ bool has_keys() { return true; }
};

template <>
struct TurnOf<true> {
    int sets;  // negative: the warpgroup has none
    u32 group;

    TurnOf() = default;
    template <class Tile>
    __device__ __forceinline__ TurnOf(const Tile &tile, u32 group) : sets(tile.key_sets), group(group) {
        if (sets > 1 && group >= sets) sets = -sets;
    }

    __device__ __forceinline__ bool alone() const { return sets > 1; }
    __device__ __forceinline__ bool has_keys() const { return sets > 0; }
    __device__ __forceinline__ u32 stages() const { return abs(sets); }
    // 0: all warpgroups.
    __device__ __forceinline__ u32 owner() const { return alone() ? 1 + group : 0; }
};
using Turn = TurnOf<OWN_KEYS>;

// A warpgroup's place in the ring of stages of K or of V. One lane of every warp says for it that a stage is empty.
template <bool OWN_KEYS>
struct StageRing : Ring<STAGES> {
    __device__ __forceinline__ void enter(const Turn &) {}
    __device__ __forceinline__ void advance(const Turn &) { Ring::advance(); }
    __device__ __forceinline__ void leave(const Turn &) { Ring::advance(); }
    __device__ __forceinline__ void await(const Turn &, u32 full) const { mbarrier_wait(full + 8 * index, parity); }
    __device__ __forceinline__ void release(const Turn &, u32 empty) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * index);
    }
};

// A stage has a barrier that says that it is full of keys for all, and one for every warpgroup. So who waits for one saw
// all its phases before, although it knows nothing of the stages of others. Who has a stage alone says for all that it is
// empty.
template <>
struct StageRing<true> {
    u32 index = 0;

    // From the first stage of a tile to the warpgroup's first.
    template <class Turn>
    __device__ __forceinline__ void enter(const Turn &turn) {
        if (turn.alone()) move(turn.group);
    }

    // To the warpgroup's next one.
    template <class Turn>
    __device__ __forceinline__ void advance(const Turn &turn) {
        flip(turn);
        move(turn.stages());
    }

    // From its last to the first of the next tile.
    template <class Turn>
    __device__ __forceinline__ void leave(const Turn &turn) {
        flip(turn);
        move(turn.stages() - (turn.alone() ? turn.group : 0));
    }

    template <class Turn>
    __device__ __forceinline__ void await(const Turn &turn, u32 full) const {
        if (turn.has_keys()) mbarrier_wait(full + 8 * (turn.owner() * STAGES + index), parities >> bit(turn) & 1);
    }

    template <class Turn>
    __device__ __forceinline__ void release(const Turn &turn, u32 empty) const {
        if (threadIdx.x % 32 != 0 || !turn.has_keys()) return;
        asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(empty + 8 * index),
                     "r"(turn.alone() ? CONSUMERS : 1)
                     : "memory");
    }

private:
    template <class Turn>
    __device__ __forceinline__ u32 bit(const Turn &turn) const {
        return turn.alone() ? STAGES + index : index;
    }
    template <class Turn>
    __device__ __forceinline__ void flip(const Turn &turn) {
        if (turn.has_keys()) parities ^= 1u << bit(turn);
    }
    __device__ __forceinline__ void move(u32 stages) {
        static_assert(!OWN_KEYS || STAGES >= CONSUMERS);
        index += stages;
        if (index >= STAGES) index -= STAGES;
    }

    u32 parities = 0;  // of the barriers for all, then of the warpgroup's
};

}  // namespace folio::prefill
