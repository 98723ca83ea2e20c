// By how many query rows a batch is cut: as the host says, or every request one item, where the workers of a kernel take an item
// together. src/cuda/attention/tilings.rs and src/plan/tile_choice.rs are the same for batches that the host knows. Where keys
// are cut is not decided here.
#pragma once
#include "core/paged.cuh"
#include "params/plan.h"

namespace folio {

__device__ __forceinline__ u32 divide_up(u32 n, u32 d) { return n == 0 ? 0 : (n - 1) / d + 1; }
__device__ __forceinline__ u32 divide_up(u32 n, const FolioDivisor &d) { return n == 0 ? 0 : divide(n - 1, d) + 1; }

// Pieces of fewer keys are not worth an item.
constexpr u32 FEWEST_KEYS = 192;
__device__ __forceinline__ u32 fewest_units(const FolioPlanParams &p) { return max(1u, FEWEST_KEYS / p.kv_unit); }

// By how many units a tile is longer than its keys where workers take shares, and which are before them.
__device__ __forceinline__ u32 units_of_tile(const FolioPlanParams &p) {
    constexpr u32 KEYS_OF_TILE = 192;
    return p.order == FOLIO_PLAN_BY_SHARE ? max(1u, KEYS_OF_TILE / p.kv_unit) : 0;
}

// Query rows of an item at most, how many workers take one together, and what follows for cutting keys.
struct Tiling {
    FolioDivisor q_tile;
    u32 workers_of_item, max_splits, max_shares;
    bool is_unequal;  // the longest request has more than twice the keys of the mean
};

__device__ __forceinline__ Tiling stated_tiling(const FolioPlanParams &p, const FolioPlanWorkers &workers) {
    return {p.q_tile, workers.of_item, p.max_splits, p.max_shares};
}

// One tile for a request of up to so many rows: the quotient of every row's number is 0.
__device__ __forceinline__ Tiling whole_requests(const FolioPlanWorkers &workers, u32 most_rows) {
    const u32 of_item = max(divide_up(most_rows * workers.num_heads, workers.rows_of_tile), 1u);
    const u32 at_a_time = max(workers.all / of_item, 1u);
    return {{most_rows, 0, 31}, of_item, at_a_time, at_a_time};
}

// Tiles of a batch, and their units of keys.
struct TileSums {
    u64 tiles, units;

    // Units of the largest of equal shares, and a little for the pieces in it.
    __device__ __forceinline__ u64 in_shares(const FolioPlanParams &p, u32 shares) const {
        const u64 all = units + tiles * units_of_tile(p), fewest = fewest_units(p);
        return max((all + shares - 1) / shares, fewest) + fewest;
    }

    // Units of the worker that has the longest tile, where tiles are dealt out whole: one of each round.
    __device__ __forceinline__ u64 in_rounds(const FolioPlanParams &p, u32 workers, u32 longest) const {
        const u64 rounds = (tiles + workers - 1) / workers, all = units + tiles * units_of_tile(p);
        return longest + units_of_tile(p) + (rounds - 1) * all / max(tiles, 1ull);
    }
};

// What a plan of a batch is chosen by; the tiles are those that are stated.
struct Choice {
    u32 most_rows;  // of a request
    u32 longest;    // units of a request
    bool is_even;   // every request has as many tiles
    TileSums requests, tiles;

    // Whether every request is one item: where that is quicker.
    __device__ __forceinline__ bool takes_whole_requests(const FolioPlanParams &p,
                                                         const FolioPlanWorkers &workers) const {
        // Smaller items have to take less time by one in so many: a request's keys are read for each of them.
        constexpr u64 LEAST_GAIN = 20;
        if (most_rows == 0 || most_rows > workers.most_rows) return false;
        // Equal shares are of requests that have as many tiles.
        const bool are_dealt = !is_even && tiles.tiles >= p.max_shares;
        const u64 of_requests = requests.in_shares(p, whole_requests(workers, most_rows).max_shares),
                  of_tiles = are_dealt ? tiles.in_rounds(p, p.max_shares, longest) : tiles.in_shares(p, p.max_shares);
        return of_tiles + of_tiles / LEAST_GAIN >= of_requests;
    }
};

}  // namespace folio
