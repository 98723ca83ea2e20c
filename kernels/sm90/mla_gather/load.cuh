// The third and fourth warpgroup: they bring the records of every tile of the CTA's items to the stages, one tile after
// another. What goes through registers is asked for a tile ahead, and where the tokens are two tiles ahead.
#pragma once

#include "sm90/mla_gather/records.cuh"

namespace folio::mla {

// The tiles of keys of the CTA's items, in order.
class KeyTiles {
public:
    __device__ __forceinline__ KeyTiles(const FolioMlaHopperParams &p, const Team &team)
        : p(p), team(team), items(p, team) {
        find();
    }

    __device__ __forceinline__ bool any() const { return key < end; }
    __device__ __forceinline__ void next() {
        if (!any()) return;  // behind the last item there are no counts to read
        key += KEYS;
        if (any()) return;
        items.next();
        find();
    }

    // The place of a token of the tile.
    __device__ __forceinline__ Place place(u32 token) const {
        const u32 at = static_cast<u32>(key) + token;
        if (at >= static_cast<u32>(end)) return {-1, 0};
        const u32 page = divide(at, p.mla.page_size);
        return {p.mla.attention.plan.page_ids[page_start + page], at - page * p.mla.page_size.divisor};
    }

private:
    // The keys of the first item from there on that has any.
    __device__ __forceinline__ void find() {
        const auto begin = [&](const RowTile &tile) { page_start = tile.page_start, key = tile.begin, end = tile.end; };
        if (!find_keys(p, team, items, begin)) key = end = 0;
    }

    const FolioMlaHopperParams &p;
    const Team &team;
    Items items;
    i64 page_start;
    i32 key, end;
};

// Records: the format.
template <class Records>
__device__ __forceinline__ void load_keys(const FolioMlaHopperParams &p, Shared &shared) {
    const u32 thread = threadIdx.x % LOADING_THREADS, token = thread / LANES, lane = thread % LANES;
    KeyTiles tiles(p, shared.team);
    Place place = tiles.place(token);
    Records records;
    records.fetch(p, place, lane);
    bool exists = tiles.any();
    tiles.next();
    Turn turn;
    place = tiles.place(token);
    bool next_exists = tiles.any();
    tiles.next();
#pragma unroll 1
    while (exists) {
        const Place later = tiles.place(token);
        exists = next_exists;
        next_exists = tiles.any();
        tiles.next();
        mbarrier_wait(shared_address(&shared.released[turn.stage()]), turn.parity() ^ 1);
        records.put(p, shared_address(shared.stages[turn.stage()]), shared_address(&shared.filled[turn.stage()]), token,
                    lane, place);
        Records::announce(p, later, lane);
        place = later;
        ++turn.tiles;
    }
}

}  // namespace folio::mla
