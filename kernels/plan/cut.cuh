// Where the keys of a batch are cut whose lengths are on the device, as src/plan/cut.rs has it: into chunks of one size, into
// chunks of the last tiles only, or where equal shares of the batch end; and which of them. What comes of it is plan.cu's.
#pragma once
#include "plan/narrow_tiles.cuh"
#include "plan/planning.cuh"
#include "plan/tail.cuh"

namespace folio {

// Requests that are kept in shared memory; larger batches are kept in the workspace.
constexpr u32 SHARED_REQUESTS = 1024;

// Where the keys of every request are cut: into chunks of one size, all of them or those of a tail, or at every multiple of a
// share of all their units. All tiles of a request that are cut are cut alike.
struct Cut {
    enum Kind { CHUNKS, TAIL, SHARES };

    Kind kind;
    Reciprocal size;  // units
    u32 fewest;       // units of the smallest piece

    // Tiles of a request that are not cut.
    __device__ __forceinline__ u32 whole_tiles(u32 b, u32 tiles_of_request) const {
        return kind == TAIL ? WholeTiles::of_block().of_request(b, tiles_of_request) : 0;
    }

    // Units before the second piece, if there is one.
    __device__ __forceinline__ u32 first_cut(u32 units_before) const {
        if (kind != SHARES) return size.divisor;
        return size.divide_up(units_before + fewest) * size.divisor - units_before;
    }
    // The share of the first piece; each next one begins the share after it.
    __device__ __forceinline__ u32 share(u32 units_before) const { return size.divide(units_before + fewest - 1); }
    __device__ __forceinline__ u32 pieces(u32 first_cut, u32 units) const {
        if (kind != SHARES) return max(1u, size.divide_up(units));
        return units < first_cut + fewest ? 1 : size.divide(units - first_cut - fewest) + 2;
    }
};

// What a request adds to the plan. Every split row has as many partial rows as its request has pieces, so the list of
// partial rows has the layout of the partial rows themselves.
struct Added {
    u32 first_cut, pieces;
    u64 items, combines, partials;

    __device__ __forceinline__ Added(const FolioDivisor &q_tile, const Requests &all, u32 b, const Cut &cut)
        : first_cut(cut.first_cut(all.request[b].units_before)), pieces(cut.pieces(first_cut, all.request[b].units)) {
        const u32 rows = all.request[b].rows, tiles = divide_up(rows, q_tile), whole = cut.whole_tiles(b, tiles);
        items = whole + static_cast<u64>(tiles - whole) * pieces;
        combines = pieces > 1 ? rows - min(rows, whole * q_tile.divisor) : 0;
        partials = combines * pieces;
    }
};

// Of a cut: what all requests add, and those before the thread's.
struct Counted {
    u64 before[2];  // items, and combine items above bit 32; partial rows
    u32 items, combines;
    u64 partials;

    __device__ __forceinline__ void add(const Added &added) {
        before[0] += added.items | added.combines << 32, before[1] += added.partials;
    }
};

__device__ __forceinline__ Counted count(const FolioDivisor &q_tile, const Requests &all, const Cut &cut) {
    __shared__ BlockScan<2> scan;
    Counted counted = {};
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) counted.add(Added(q_tile, all, b, cut));
    scan.exclusive(counted.before);
    counted.items = static_cast<u32>(scan.totals[0]), counted.combines = static_cast<u32>(scan.totals[0] >> 32);
    counted.partials = scan.totals[1];
    __syncthreads();  // before another cut is counted
    return counted;
}

// Units in the time of chunks of one size: items of mean length are dealt out in rounds, none ends before the longest
// item, and rows that are split are combined.
__device__ __forceinline__ u64 cost_of_chunks(const FolioPlanParams &p, const Batch &batch, u32 chunk,
                                              const Counted &counted) {
    const u32 items = max(1u, counted.items), rounds = (items - 1) / batch.tiling.max_shares + 1,
              of_tile = units_of_tile(p);
    const u64 units = batch.tile_units + static_cast<u64>(items) * of_tile;
    const u64 in_rounds = rounds * units / items, longest = min(chunk, batch.most_units) + of_tile;
    // Items of workers that take shares are dealt out before it is known how long they take: who has the longest has one of
    // each round.
    const u64 dealt = of_tile > 0 ? longest + in_rounds - in_rounds / rounds : max(in_rounds, longest);
    return dealt + (counted.combines > 0 ? p.combine_units : 0);
}

// Units of equal shares, or 0 where chunks of one size do not take much longer. A share of requests of several tiles is that
// of as many workers.
__device__ __forceinline__ u32 worthwhile_share(const FolioPlanParams &p, const Batch &batch, u32 chunk,
                                                const Counted &counted) {
    // After so many rounds a last one that is not full costs less than a tenth.
    constexpr u32 ROUNDS = 10;
    const u32 most = batch.tiling.max_shares;
    if (most <= 1 || p.batch_size / most >= ROUNDS || !batch.is_even) return 0;
    const u32 tiles = max(1u, batch.most_tiles), shares = most / tiles, of_tile = units_of_tile(p);
    if (of_tile > 0 && (tiles > 1 || p.batch_size > SHARED_REQUESTS)) return 0;
    const u64 units = (batch.tile_units + of_tile * batch.tiles) / tiles;
    if (shares <= 1 || units >= 1u << 31) return 0;
    const u32 fewest = fewest_units(p), share = max(divide_up(static_cast<u32>(units), shares), fewest);
    // Shares are worth their irregular pieces where chunks take this much longer, in tenths.
    constexpr u64 WORTH_SHARES = 11;
    const u64 cost = static_cast<u64>(share) + fewest + p.combine_units;
    return WORTH_SHARES * cost < 10 * cost_of_chunks(p, batch, chunk, counted) ? share : 0;
}

// Whether the workspace has room for a cut.
__device__ __forceinline__ bool fits(const FolioPlanParams &p, const Counted &counted) {
    return counted.items <= p.max_items && counted.combines <= p.max_combines && counted.partials <= p.max_partial_rows;
}

// What takes less time than chunks of one size: equal shares, or a tail; else those chunks.
__device__ __forceinline__ Cut better_than(const Cut &chunks, const FolioPlanBatchParams &params, const Requests &all,
                                           const Batch &batch, const Counted &counted) {
    Cut cut = chunks;
    const u32 share = worthwhile_share(params.plan, batch, chunks.size.divisor, counted);
    if (share > 0) {
        cut.kind = Cut::SHARES, cut.size = Reciprocal(share);
        return cut;
    }
    const Tail tail = worthwhile_tail(params, all, batch, chunks.size.divisor);
    if (tail.units == 0) return chunks;
    cut.kind = Cut::TAIL, cut.size = Reciprocal(tail.units);
    find_whole_tiles(all, batch.tiling.q_tile, tail.whole);
    return cut;
}

// By how many units it takes longer to put all rows together. As in src/plan/chunk_size.rs, by the rows of the largest tile.
__device__ __forceinline__ u32 units_to_combine(const FolioPlanWorkers &workers, const Batch &batch) {
    if (workers.rows_of_unit == 0) return 0;
    return static_cast<u32>(batch.tiles * batch.most_rows / workers.rows_of_unit);
}

// The quickest cut, by estimates. Tiles become narrow where that lets all of them run at a time and leaves their keys whole: no
// other cut is tried then. Tails are estimated by the mean of their tiles, so that there may be no room for one.
__device__ __forceinline__ Cut choose(const FolioPlanBatchParams &params, const Requests &all, Batch &batch,
                                      Counted &counted) {
    const FolioPlanParams &p = params.plan;
    const FolioDivisor &narrow = narrowest_tile(params.narrow, all, batch);
    const bool may_be_narrow = narrow.divisor < batch.tiling.q_tile.divisor;
    const u32 units = p.invariant_chunk ? p.invariant_chunk / p.kv_unit
                                        : smallest_chunk(p, all, batch,
                                                         (may_be_narrow ? params.narrow.least_gain : p.least_gain) +
                                                             units_to_combine(params.workers, batch));
    const bool is_narrow = may_be_narrow && units == NOT_SPLIT;
    if (is_narrow) batch.take_tiles(narrow);
    const Cut chunks = {Cut::CHUNKS, Reciprocal(units), fewest_units(p)};
    Cut cut = chunks;
    bool is_last = p.invariant_chunk > 0 || is_narrow;
#pragma unroll 1  // one copy of the code
    while (true) {
        counted = count(batch.tiling.q_tile, all, cut);
        if (is_last || cut.kind == Cut::SHARES || (cut.kind == Cut::TAIL && fits(p, counted))) return cut;
        is_last = cut.kind == Cut::TAIL;
        cut = is_last ? chunks : better_than(chunks, params, all, batch, counted);
        if (!is_last && cut.kind == Cut::CHUNKS) return cut;
    }
}

}  // namespace folio
