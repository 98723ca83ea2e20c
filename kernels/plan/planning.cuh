// Cutting batches whose lengths are on the device: what plan.cu and plan_cascade.cu have in common. One CTA, no
// synchronisation with the host. Nobody has checked these lengths: what exceeds the desc's maxima is cut off or dropped,
// so that nothing is ever written outside the workspace.
//
// Its time is what waits for something else: the caller's lengths are read once, by one round of loads, and
// then live in shared memory; a thread has neighbouring requests, so that prefix sums take few shuffles.
#pragma once
#include "plan/tilings.cuh"

namespace folio {

// The host takes fewer threads where there is little to do: they share one multiprocessor's instruction slots.
constexpr u32 MAX_WARPS = FOLIO_THREADS / 32, CLASSES = 16;
// A longest request of so many units is not split, as in src/plan/schedule.rs.
constexpr u32 UNITS_NOT_SPLIT = 2;
// Units of a chunk that no request exceeds.
constexpr u32 NOT_SPLIT = 0x7fffffffu;
static_assert(MAX_WARPS <= 32, "a lane per warp");

__device__ __forceinline__ u32 lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ u32 warp_index() { return threadIdx.x / 32; }
__device__ __forceinline__ u32 num_warps() { return blockDim.x / 32; }

template <class T>
__device__ __forceinline__ T warp_inclusive(T value) {
#pragma unroll
    for (u32 i = 1; i < 32; i *= 2) {
        const T other = __shfl_up_sync(FULL_WARP, value, i);
        if (lane_index() >= i) value += other;
    }
    return value;
}

// Exclusive prefixes over the block, in place, of N values of every thread. Warp n scans the warps' sums of
// value n.
template <u32 N>
struct BlockScan {
    u64 of_warps[N][MAX_WARPS], totals[N];

    __device__ __forceinline__ void exclusive(u64 (&x)[N]) {
        static_assert(N <= 8, "a warp per value, of the few threads of a small plan");
        const u32 lane = lane_index(), warp = warp_index();
#pragma unroll
        for (u32 n = 0; n < N; n++) {
            const u64 inclusive = warp_inclusive(x[n]);
            if (lane == 31) of_warps[n][warp] = inclusive;
            x[n] = inclusive - x[n];
        }
        __syncthreads();
        if (warp < N) {
            const u64 own = lane < num_warps() ? of_warps[warp][lane] : 0, inclusive = warp_inclusive(own);
            if (lane < num_warps()) of_warps[warp][lane] = inclusive - own;
            if (lane == 31) totals[warp] = inclusive;
        }
        __syncthreads();
#pragma unroll
        for (u32 n = 0; n < N; n++) x[n] += of_warps[n][warp];
    }
};

// The maximum of the threads before this one, or 0. One barrier; another is needed before the next call.
__device__ __forceinline__ u32 exclusive_maximum(u32 x) {
    __shared__ u32 of_warps[MAX_WARPS];
    u32 before = __shfl_up_sync(FULL_WARP, x, 1);
    if (lane_index() == 0) before = 0;
#pragma unroll
    for (u32 i = 1; i < 32; i *= 2) {
        const u32 other = __shfl_up_sync(FULL_WARP, before, i);
        if (lane_index() >= i) before = max(before, other);
    }
    if (lane_index() == 31) of_warps[warp_index()] = max(before, x);
    __syncthreads();
    const u32 of_warp = lane_index() < warp_index() ? of_warps[lane_index()] : 0;
    return max(before, __reduce_max_sync(FULL_WARP, of_warp));
}

// Maxima and sums over the block, for which one barrier is enough.
struct BlockReduce {
    u32 of_warps[2][3][MAX_WARPS];

    __device__ __forceinline__ void put(u32 buffer, u32 n, u32 of_warp) {
        if (lane_index() == 0) of_warps[buffer][n][warp_index()] = of_warp;
    }
    __device__ __forceinline__ u32 get(u32 buffer, u32 n) const {
        return lane_index() < num_warps() ? of_warps[buffer][n][lane_index()] : 0;
    }
};

// Division of many numbers by one, for quotients up to 2^21: the estimate is then off by one at most.
struct Reciprocal {
    u32 divisor;
    float estimate;

    __device__ __forceinline__ explicit Reciprocal(u32 divisor)
        : divisor(divisor), estimate(reciprocal_approx(static_cast<float>(divisor))) {}

    __device__ __forceinline__ u32 divide(u32 n) const {
        const u32 q = static_cast<u32>(static_cast<float>(n) * estimate);
        const i32 rest = static_cast<i32>(n - q * divisor);
        return rest < 0 ? q - 1 : rest >= static_cast<i32>(divisor) ? q + 1 : q;
    }
    __device__ __forceinline__ u32 divide_up(u32 n) const { return n == 0 ? 0 : divide(n - 1) + 1; }
};

__device__ __forceinline__ i32 clamp(i64 x, u32 most) {
    return static_cast<i32>(min(max(x, 0ll), static_cast<i64>(most)));
}

// Records of all requests (in a cascade of its segments too), and what is summed over them.
struct Requests {
    FolioPlanRequest *request;
    u32 *first_item, *first_combine;
    u32 begin, end;  // the thread's
};

// What the cut and the order of items are chosen from. Units of keys are those of `p.kv_unit`.
struct Batch {
    Tiling &tiling;  // shared by the block
    u64 tiles, tile_units;
    u32 most_units, most_rows, most_tiles;  // rows: of an item
    bool is_even;                           // every request with rows has the most tiles

    // Tiles of other rows, which are not counted anew.
    __device__ __forceinline__ void take_tiles(const FolioDivisor &q_tile) {
        __syncthreads();
        if (threadIdx.x == 0) tiling.q_tile = q_tile;
        __syncthreads();
    }
};

// What the caller says of a request; all of it is loaded before any of it is looked at.
struct Lengths {
    i64 row, next_row, page_start, next_page;
    i32 stated, last;

    __device__ __forceinline__ Lengths(const FolioPlanParams &p, u32 b)
        : row(p.qo_indptr ? p.qo_indptr[b] : static_cast<i64>(b) * p.fixed_qo_len),
          next_row(p.qo_indptr ? p.qo_indptr[b + 1] : static_cast<i64>(b + 1) * p.fixed_qo_len),
          page_start(p.kv_indptr ? min(max(static_cast<i64>(p.kv_indptr[b]), 0ll), p.num_page_ids)
                                 : static_cast<i64>(b) * p.table_stride),
          next_page(p.kv_indptr ? p.kv_indptr[b + 1] : 0),
          stated(p.kv_len ? p.kv_len[b] : 0),
          last(p.last_page_len ? p.last_page_len[b] : 1) {}

    __device__ __forceinline__ i32 keys(const FolioPlanParams &p) const {
        const i64 pages = next_page - page_start, from_pages = pages <= 0 ? 0 : (pages - 1) * p.page_size + last;
        // No key may need a page id beyond those that there are: a request's own row, or the end of all.
        const i64 page_ids = p.kv_indptr ? p.num_page_ids - page_start : p.num_page_ids;
        return clamp(min(p.kv_len ? stated : from_pages, page_ids * p.page_size), p.max_kv_len);
    }
};

// Where the keys begin that rows of a request may see, in whole units.
__device__ __forceinline__ u32 first_key(const FolioPlanParams &p, u32 rows, u32 keys) {
    if (p.window_left < 0) return 0;
    const u32 seen = clamp(static_cast<i64>(keys) - rows - p.window_left, keys);
    return seen - seen % p.kv_unit;
}

// The requests that have items in this plan: decodes, prompts or all.
struct Planned {
    u32 least_rows, most_rows;

    __device__ __forceinline__ explicit Planned(const FolioPlanParams &p) {
        const bool decodes = p.decode_rows > 0 && !p.decode_counts;
        least_rows = p.decode_counts && p.decode_counts[FOLIO_COUNT_ITEMS] > 0 ? p.decode_rows + 1 : 0;
        most_rows = decodes ? p.decode_rows : 0xffffffff;
    }
    __device__ __forceinline__ bool has(u32 rows) const { return rows >= least_rows && rows <= most_rows; }
};

// The caller's lengths, within the maxima, and where custom masks start. A falling qo_indptr counts as no rows.
__device__ __forceinline__ Batch read_lengths(const FolioPlanParams &p, const FolioPlanWorkers &workers,
                                              const Requests &all) {
    __shared__ Tiling tiling;
    __shared__ BlockScan<5> scan;
    __shared__ BlockReduce maxima;
    // Requests with items and, above bit 32, their tiles; units of the tiles, mask elements as bytes and as bits, and units of
    // the requests.
    u64 sums[5] = {};
    const Planned planned(p);
    u32 most_units = 0, most_rows = 0, most_tiles = 0, not_fewest = 0;
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) {
        const Lengths lengths(p, b);
        const i32 row = clamp(lengths.row, p.max_num_tokens), next_row = clamp(lengths.next_row, p.max_num_tokens);
        const u32 rows = clamp(next_row - row, p.max_qo_len), keys = lengths.keys(p);
        const bool has_items = planned.has(rows);
        const u32 tiles = has_items ? divide_up(rows, p.q_tile) : 0;
        const u32 units = tiles > 0 ? divide_up(keys - first_key(p, rows, keys), p.kv_unit) : 0;
        const u64 elements = static_cast<u64>(rows) * keys;
        FolioPlanRequest &request = all.request[b];
        request.page_start = lengths.page_start, request.q_token = row;
        request.rows = rows, request.keys = keys, request.units = units;
        p.out_qo_indptr[b] = row, p.out_kv_len[b] = has_items ? keys : 0;
        if (b + 1 == p.batch_size) p.out_qo_indptr[b + 1] = next_row;
        sums[0] += static_cast<u64>(tiles) << 32 | (tiles > 0), sums[1] += static_cast<u64>(tiles) * units;
        sums[2] += elements, sums[3] += (elements + 7) / 8, sums[4] += units;
        most_units = max(most_units, units), most_rows = max(most_rows, has_items ? rows : 0);
        most_tiles = max(most_tiles, tiles), not_fewest = max(not_fewest, tiles == 0 ? 0 : ~tiles);
    }
    if (p.batch_size == 0 && threadIdx.x == 0) p.out_qo_indptr[0] = 0;
    maxima.put(0, 0, __reduce_max_sync(FULL_WARP, most_units));
    maxima.put(0, 1, __reduce_max_sync(FULL_WARP, most_rows));
    maxima.put(0, 2, __reduce_max_sync(FULL_WARP, most_tiles));
    maxima.put(1, 0, __reduce_max_sync(FULL_WARP, not_fewest));
    scan.exclusive(sums);
    most_units = __reduce_max_sync(FULL_WARP, maxima.get(0, 0));
    most_rows = __reduce_max_sync(FULL_WARP, maxima.get(0, 1));
    most_tiles = __reduce_max_sync(FULL_WARP, maxima.get(0, 2));
    const bool is_even = ~__reduce_max_sync(FULL_WARP, maxima.get(1, 0)) == most_tiles;
    const Choice choice = {most_rows,
                           most_units,
                           is_even,
                           {static_cast<u32>(scan.totals[0]), scan.totals[4]},
                           {scan.totals[0] >> 32, scan.totals[1]}};
    const bool is_worth_it = choice.tiles.units >= p.least_units, is_whole = choice.takes_whole_requests(p, workers);
    if (threadIdx.x == 0) {
        tiling = is_whole ? whole_requests(workers, most_rows) : stated_tiling(p, workers);
        // As src/plan/schedule.rs: the longest request has more than twice the keys of the mean.
        tiling.is_unequal = static_cast<u64>(most_units) * choice.requests.tiles > 2 * choice.requests.units;
    }
    const u32 of_tile = units_of_tile(p);
    if (is_whole) most_tiles = 1;
    // Of tiles before it, and of its own.
    const TileSums before = is_whole ? TileSums{static_cast<u32>(sums[0]), sums[4]} : TileSums{sums[0] >> 32, sums[1]};
    u64 units_before = (before.units + of_tile * before.tiles) / max(1u, most_tiles) + of_tile, bytes = sums[2],
        bits = sums[3];
    u32 tiles_before = static_cast<u32>(before.tiles);
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) {
        FolioPlanRequest &request = all.request[b];
        const u64 elements = static_cast<u64>(request.rows) * request.keys;
        if (!is_worth_it || !planned.has(request.rows)) request.rows = 0;
        request.units_before = static_cast<u32>(units_before), request.tiles_before = tiles_before;
        tiles_before += request.rows == 0 ? 0 : is_whole ? 1 : divide_up(request.rows, p.q_tile);
        p.out_mask_bytes_start[b] = bytes, p.out_mask_bits_start[b] = bits;
        units_before += request.rows == 0 ? 0 : request.units + of_tile;
        bytes += elements, bits += (elements + 7) / 8;
    }
    __syncthreads();  // the tiling
    if (!is_worth_it) return {tiling};
    const TileSums total = is_whole ? choice.requests : choice.tiles;
    return {tiling,     total.tiles,        total.units, most_units, min(most_rows, tiling.q_tile.divisor),
            most_tiles, is_whole || is_even};
}

// What chunks of one size are kept to: so many splits, or so many chunks of tiles that are split.
struct Limit {
    u32 not_counted;  // chunks of a tile that is split
    u64 most;
};

// Units of the smallest chunk from `low` on that keeps to a limit, where `high` is enough or the last resort. Each round
// tries three sizes, which leaves a quarter of the range; one barrier a round, since the next one writes the other buffer.
__device__ __forceinline__ u32 smallest_that_fits(const Tiling &tiling, const Requests &all, u32 low, u32 high,
                                                  const Limit &limit) {
    __shared__ BlockReduce sums;
    const u32 too_many = static_cast<u32>(min(limit.most + 1, 1ull << 26));  // 32 of them fit a u32
    for (u32 buffer = 0; low < high; buffer ^= 1) {
        const u32 range = high - low, sizes[3] = {low + range / 4, low + range / 2, high - 1 - (range - 1) / 4};
        const Reciprocal chunks[3] = {Reciprocal(sizes[0]), Reciprocal(sizes[1]), Reciprocal(sizes[2])};
        u32 counted[3] = {};
#pragma unroll 1
        for (u32 b = all.begin; b < all.end; b++) {
            const u32 units = all.request[b].units, tiles = divide_up(all.request[b].rows, tiling.q_tile);
#pragma unroll
            for (u32 n = 0; n < 3; n++) {
                const u32 of_tile = chunks[n].divide_up(units);
                if (of_tile <= 1) continue;
                const u64 more = static_cast<u64>(tiles) * (of_tile - limit.not_counted);
                counted[n] = static_cast<u32>(min(counted[n] + more, static_cast<u64>(too_many)));
            }
        }
#pragma unroll
        for (u32 n = 0; n < 3; n++) sums.put(buffer, n, min(__reduce_add_sync(FULL_WARP, counted[n]), too_many));
        __syncthreads();
        bool fits[3];
#pragma unroll
        for (u32 n = 0; n < 3; n++) fits[n] = __reduce_add_sync(FULL_WARP, sums.get(buffer, n)) <= limit.most;
        high = fits[0] ? sizes[0] : fits[1] ? sizes[1] : fits[2] ? sizes[2] : high;
        low = fits[0] ? low : fits[1] ? sizes[0] + 1 : fits[2] ? sizes[1] + 1 : sizes[2] + 1;
    }
    return high;
}

__device__ __forceinline__ bool is_much_longer(u32 chunk, u32 than) {
    return 8 * static_cast<u64>(chunk) > 9 * static_cast<u64>(than);
}

// Units that a tile of the longest request sees: under a window, no more than its rows and the window span.
__device__ __forceinline__ u32 most_units_of_tile(const FolioPlanParams &p, const Batch &batch, u32 most_units) {
    if (p.window_left < 0) return most_units;
    return min(most_units, divide_up(p.window_left + batch.tiling.q_tile.divisor, p.kv_unit) + 1);
}

// Units of the smallest chunk that makes no more splits than the budget, or of one near the fair share where that is much
// less.
__device__ __forceinline__ u32 smallest_chunk(const FolioPlanParams &p, const Requests &all, const Batch &batch,
                                              u32 least_gain) {
    const Tiling &tiling = batch.tiling;
    // All items together come to max_splits, but half as many splits are always allowed.
    const u64 budget = max(tiling.max_splits - min(batch.tiles, static_cast<u64>(tiling.max_splits)),
                           static_cast<u64>(tiling.max_splits / 2));
    const u32 most_units = max(1u, batch.most_units);
    if (budget == 0 || most_units <= UNITS_NOT_SPLIT) return NOT_SPLIT;
    const auto units = [&](u64 share) { return static_cast<u32>(min(max(share, 1ull), static_cast<u64>(most_units))); };
    const auto divided_up = [&](u64 among) { return (batch.tile_units + among - 1) / among; };
    const u32 fair = units(divided_up(tiling.max_splits));
    u32 low = units(batch.tile_units / (budget + batch.tiles)), high = units(divided_up(budget)), chunk = high;
    Limit limit = {1, budget};
#pragma unroll 1  // one copy of the code
    for (u32 search = 0; search < 2; search++) {
        const u32 found = smallest_that_fits(tiling, all, low, high, limit);
        if (search == 0 || is_much_longer(chunk, found)) chunk = found;
        if (!is_much_longer(chunk, fair)) break;
        low = fair, high = chunk, limit = {0, tiling.max_splits};
        __syncthreads();  // before the second search writes the first one's buffers
    }
    return chunk + least_gain < most_units_of_tile(p, batch, most_units) ? chunk : NOT_SPLIT;
}

struct Counts {
    u32 items, combines;
};

// What runs read of the plan's size: no more than the workspace has room for.
__device__ __forceinline__ Counts store_counts(const FolioPlanParams &p, u32 workers_of_item, u64 items, u64 combines) {
    const Counts counts = {static_cast<u32>(min(items, static_cast<u64>(p.max_items))),
                           static_cast<u32>(min(combines, static_cast<u64>(p.max_combines)))};
    if (threadIdx.x == 0) {
        p.counts[FOLIO_COUNT_ITEMS] = counts.items, p.counts[FOLIO_COUNT_COMBINES] = counts.combines,
        p.counts[FOLIO_COUNT_REQUESTS] = p.batch_size, p.counts[FOLIO_COUNT_SMALL_ITEMS] = 0;
        p.counts[FOLIO_COUNT_SHARES] = 0;
        p.counts[FOLIO_COUNT_WORKERS_OF_ITEM] = workers_of_item;
        *p.next_tile = 0;
    }
    return counts;
}

// As vectors; the records' parts of the workspace are aligned.
template <class T>
__device__ __forceinline__ void store_record(T *target, const T &record) {
    union {
        T whole;
        uint4 vectors[sizeof(T) / 16];
    } as = {record};
#pragma unroll
    for (u32 i = 0; i < sizeof(T) / 16; i++) reinterpret_cast<uint4 *>(target)[i] = as.vectors[i];
}

// The last request whose first record is not after `index`.
__device__ __forceinline__ u32 find(const u32 *first, u32 num_requests, u32 index) {
    u32 low = 0, high = num_requests;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (first[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Of an item of so many units and rows.
__device__ __forceinline__ float cost_of(const FolioPlanParams &p, u32 units, u32 rows) {
    return static_cast<float>(units) * static_cast<float>(p.kv_unit * rows);
}

// 0 comes first.
__device__ __forceinline__ u32 order_class(u32 weight, float scale) {
    return CLASSES - 1 - min(static_cast<u32>(static_cast<float>(weight) * scale), CLASSES - 1);
}

// Counters of a stable counting sort: of every class, the items of each warp.
struct ClassCounters {
    u32 next[CLASSES * MAX_WARPS];

    __device__ __forceinline__ void clear() {
        for (u32 i = threadIdx.x; i < CLASSES * MAX_WARPS; i += blockDim.x) next[i] = 0;
    }

    // Adds the lane's item, and returns how many came before it. The warp's lanes call together.
    __device__ __forceinline__ u32 add(bool valid, u32 of_class) {
        const u32 peers = __match_any_sync(FULL_WARP, valid ? of_class : CLASSES);
        const u32 rank = __popc(peers & ((1u << lane_index()) - 1));
        u32 &count = next[of_class * MAX_WARPS + warp_index()];
        const u32 before = count;
        __syncwarp();
        if (valid && rank == 0) count = before + __popc(peers);
        __syncwarp();
        return before + rank;
    }

    // Counts become first places; one warp does it.
    __device__ __forceinline__ void scan() {
        constexpr u32 N = CLASSES * MAX_WARPS / 32;
        u32 *const own = next + lane_index() * N;
        u32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < N; i++) sum += own[i];
        u32 before = warp_inclusive(sum) - sum;
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            const u32 here = own[i];
            own[i] = before;
            before += here;
        }
    }
};

// An item, and what it is sorted by.
struct WeighedItem {
    FolioWorkItem item;
    u32 weight;
};

// Every warp has a run of neighbouring items, and goes over it twice: to count, and to write. make_item(index) is an item
// in natural order, whose weight times `scale` is its class.
template <class MakeItem>
__device__ __forceinline__ void write_items(const FolioPlanParams &p, u32 num_items, const MakeItem &make_item,
                                            float scale) {
    __shared__ ClassCounters counters;
    counters.clear();
    __syncthreads();
    const u32 run = 32 * divide_up(num_items, blockDim.x), begin = warp_index() * run,
              end = min(begin + run, num_items);
    WeighedItem made;
#pragma unroll 1
    for (u32 pass = 0; pass < 2; pass++) {
#pragma unroll 1
        for (u32 first = begin; first < end; first += 32) {
            const u32 index = first + lane_index();
            const bool valid = index < end;
            if (pass == 0 || run > 32) made = make_item(min(index, end - 1));
            const u32 at = counters.add(valid, order_class(made.weight, scale));
            if (pass == 0 || !valid) continue;
            store_record(p.items + at, made.item);
        }
        if (pass == 1) break;
        __syncthreads();
        if (warp_index() == 0) counters.scan();
        __syncthreads();
    }
}

}  // namespace folio
