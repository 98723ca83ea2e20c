// Cuts a batch whose lengths are on the device and whose requests share keys. Which requests share how many keys at most the
// host has said; how many of them all of these requests have, and see whole, is measured here. So lengths that are shorter
// than was said make segments shorter, and results stay right.
//
// A segment is cut as a request is: rows against a range of keys, in chunks of the one size that all are cut into. What
// requests keep for themselves are the keys behind their innermost segment. So the rules of plan.cu hold for entries, which
// are the requests and, behind them, the segments. Only a row's parts are in several entries: its request, and the segments
// around that.
#include "params/cascade.h"
#include "plan/planning.cuh"

namespace folio {

// Entries that are kept in shared memory; more of them are kept in the workspace.
constexpr u32 SHARED_ENTRIES = 640;

struct Entries {
    Requests requests;  // the records of all entries
    FolioPlanShare *share;
    u32 batch_size, count;

    __device__ __forceinline__ bool is_segment(u32 entry) const { return entry >= batch_size; }
    __device__ __forceinline__ u32 first_key(u32 entry) const {
        return share[entry].end - requests.request[entry].keys;
    }
};

// Rows, pages and the last key of every segment; a warp has a segment. Requests without rows are not asked: they may have
// no pages.
__device__ __forceinline__ void measure_segments(const FolioPlanCascadeParams &c, const Entries &all) {
    const FolioPlanRequest *const requests = all.requests.request;
    for (u32 s = warp_index(); s < c.num_segments; s += num_warps()) {
        const FolioSharedSegment &segment = c.segments[s];
        u32 first = segment.end, seen = segment.keys, end_row = 0;
        for (u32 b = segment.begin + lane_index(); b < segment.end; b += 32) {
            const u32 rows = requests[b].rows, keys = requests[b].keys;
            if (rows == 0) continue;
            first = min(first, b);
            seen = min(seen, keys - min(keys, rows));  // all rows see the keys before the new ones
            end_row = max(end_row, requests[b].q_token + rows);
        }
        first = __reduce_min_sync(FULL_WARP, first);
        seen = __reduce_min_sync(FULL_WARP, seen);
        end_row = __reduce_max_sync(FULL_WARP, end_row);
        if (lane_index() != 0) continue;
        FolioPlanRequest entry = {};
        if (first < segment.end) {
            entry.page_start = requests[first].page_start;
            entry.q_token = requests[first].q_token;
            entry.rows = end_row - entry.q_token;
        }
        all.requests.request[c.plan.batch_size + s] = entry;
        const u32 parent = segment.parent == FOLIO_NO_SEGMENT ? FOLIO_NO_SEGMENT : c.plan.batch_size + segment.parent;
        all.share[c.plan.batch_size + s] = {seen / c.plan.kv_unit * c.plan.kv_unit, first, parent, 0};
    }
    __syncthreads();
}

// The entry of the innermost segment that has the request: the last one that begins at or before it, or one around that.
__device__ __forceinline__ u32 innermost_around(const FolioPlanCascadeParams &c, u32 request) {
    u32 low = 0, high = c.num_segments;
    while (low < high) {
        const u32 middle = low + (high - low) / 2;
        if (c.segments[middle].begin <= request) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    u32 segment = low - 1;  // FOLIO_NO_SEGMENT where none does
    while (segment != FOLIO_NO_SEGMENT && c.segments[segment].end <= request) segment = c.segments[segment].parent;
    return segment == FOLIO_NO_SEGMENT ? FOLIO_NO_SEGMENT : c.plan.batch_size + segment;
}

// Leaves to every entry the keys behind those of the segment around it. A segment without such keys has no rows.
__device__ __forceinline__ Batch share_keys(const FolioPlanCascadeParams &c, Tiling &tiling, const Entries &all) {
    __shared__ BlockScan<2> scan;
    __shared__ BlockReduce maxima;
    u64 sums[2] = {};  // tiles, and their units
    u32 most_units = 0, most_rows = 0;
#pragma unroll 1
    for (u32 e = all.requests.begin; e < all.requests.end; e++) {
        FolioPlanRequest &entry = all.requests.request[e];
        FolioPlanShare &share = all.share[e];
        if (!all.is_segment(e)) share = {entry.keys, e, innermost_around(c, e), 0};
        const u32 start = share.parent == FOLIO_NO_SEGMENT ? 0 : all.share[share.parent].end;
        entry.keys = share.end - min(start, share.end);
        entry.units = divide_up(entry.keys, c.plan.kv_unit);
        if (all.is_segment(e) && entry.keys == 0) entry.rows = 0;
        const u32 tiles = divide_up(entry.rows, c.plan.q_tile);
        sums[0] += tiles, sums[1] += static_cast<u64>(tiles) * entry.units;
        if (tiles == 0) continue;
        most_units = max(most_units, entry.units), most_rows = max(most_rows, min(entry.rows, c.plan.q_tile.divisor));
    }
    maxima.put(0, 0, __reduce_max_sync(FULL_WARP, most_units));
    maxima.put(0, 1, __reduce_max_sync(FULL_WARP, most_rows));
    scan.exclusive(sums);
    return {tiling,
            scan.totals[0],
            scan.totals[1],
            __reduce_max_sync(FULL_WARP, maxima.get(0, 0)),
            __reduce_max_sync(FULL_WARP, maxima.get(0, 1)),
            0,
            false};
}

// Chunks of an entry. Rows without keys have to be written; so a request has at least one.
__device__ __forceinline__ u32 chunks_of(const Entries &all, u32 entry, u32 chunk) {
    const FolioPlanRequest &of = all.requests.request[entry];
    if (!all.is_segment(entry)) return max(1u, divide_up(of.keys, chunk));
    return of.rows == 0 ? 0 : divide_up(of.keys, chunk);
}

// Parts of a row of a request.
__device__ __forceinline__ u32 parts_of(const Entries &all, u32 request, u32 chunk) {
    u32 parts = 0;
    for (u32 e = request; e != FOLIO_NO_SEGMENT; e = all.share[e].parent) parts += chunks_of(all, e, chunk);
    return parts;
}

// What an entry adds to the plan.
struct Added {
    u64 items, combines, partial_rows, parts;

    __device__ __forceinline__ Added(const FolioPlanParams &p, const Entries &all, u32 entry, u32 chunk)
        : combines(0), partial_rows(0), parts(0) {
        const FolioPlanRequest &of = all.requests.request[entry];
        const u32 chunks = chunks_of(all, entry, chunk);
        const u64 rows = of.rows;
        items = static_cast<u64>(divide_up(of.rows, p.q_tile)) * chunks;
        const u32 parts_of_row = all.is_segment(entry) ? 0 : parts_of(all, entry, chunk);
        if (all.is_segment(entry) || parts_of_row > 1) partial_rows = rows * chunks;
        if (parts_of_row > 1) combines = rows, parts = rows * parts_of_row;
    }
};

// Where each entry's items and partial rows start, and each request's combine items and their lists of partial rows.
__device__ __forceinline__ Counts lay_out(const FolioPlanParams &p, const Entries &all, u32 chunk) {
    __shared__ BlockScan<4> scan;
    u64 sums[4] = {};
#pragma unroll 1
    for (u32 e = all.requests.begin; e < all.requests.end; e++) {
        const Added added(p, all, e, chunk);
        sums[0] += added.items, sums[1] += added.combines, sums[2] += added.partial_rows, sums[3] += added.parts;
    }
    scan.exclusive(sums);
#pragma unroll 1
    for (u32 e = all.requests.begin; e < all.requests.end; e++) {
        const Added added(p, all, e, chunk);
        FolioPlanRequest &entry = all.requests.request[e];
        entry.pieces = chunks_of(all, e, chunk);
        entry.first_partial = added.partial_rows > 0 ? static_cast<u32>(sums[2]) : FOLIO_NO_PARTIAL;
        all.share[e].first_part = static_cast<u32>(sums[3]);
        all.requests.first_item[e] = static_cast<u32>(sums[0]);
        all.requests.first_combine[e] = static_cast<u32>(sums[1]);
        sums[0] += added.items, sums[1] += added.combines, sums[2] += added.partial_rows, sums[3] += added.parts;
    }
    const Counts counts = store_counts(p, 0, scan.totals[0], scan.totals[1]);
    __syncthreads();
    return counts;
}

// The partial row of an entry's chunk: a tile's rows lie together, once for every chunk.
__device__ __forceinline__ u32 partial_row(const FolioPlanParams &p, const FolioPlanRequest &entry, u32 row,
                                           u32 chunk) {
    const u32 q_start = divide(row, p.q_tile) * p.q_tile.divisor, q_len = min(p.q_tile.divisor, entry.rows - q_start);
    return entry.first_partial + q_start * entry.pieces + chunk * q_len + row - q_start;
}

// The parts of a row in the order of the keys. One whose parts do not all fit in the workspace is dropped: it has none.
__device__ __forceinline__ void write_combines(const FolioPlanParams &p, const Entries &all, u32 num_combines) {
    const FolioPlanRequest *const entries = all.requests.request;
#pragma unroll 1
    for (u32 n = threadIdx.x; n < num_combines; n += blockDim.x) {
        const u32 request = find(all.requests.first_combine, p.batch_size, n);
        const u32 row = n - all.requests.first_combine[request], token = entries[request].q_token + row;
        u32 count = 0;
        for (u32 e = request; e != FOLIO_NO_SEGMENT; e = all.share[e].parent) count += entries[e].pieces;
        const u64 first = all.share[request].first_part + static_cast<u64>(row) * count;
        bool fits = first + count <= p.max_partial_rows;
        u64 next = first + count;  // from the own keys outwards
        for (u32 e = request; fits && e != FOLIO_NO_SEGMENT; e = all.share[e].parent) {
            for (u32 c = entries[e].pieces; c-- > 0;) {
                const u32 partial = partial_row(p, entries[e], token - entries[e].q_token, c);
                fits = fits && partial < p.max_partial_rows;
                p.partials[--next] = partial;
            }
        }
        store_record(p.combines + n, FolioCombineItem{token, static_cast<u32>(first), fits ? count : 0, 0});
    }
}

// Item `index` in natural order: by entry, tile, chunk. All rows see shared keys, so they stand behind them.
__device__ __forceinline__ FolioWorkItem make_item(const FolioPlanParams &p, const Entries &all, u32 index, u32 chunk) {
    FolioWorkItem item = {};
    const Requests &requests = all.requests;
    const u32 e = find(requests.first_item, all.count, index);
    const FolioPlanRequest &entry = requests.request[e];
    const FolioPlanShare &share = all.share[e];
    const u32 within = index - requests.first_item[e], t = within / entry.pieces, c = within - t * entry.pieces;
    const i64 past = static_cast<i64>(share.end) - (all.is_segment(e) ? 0 : entry.rows);
    item.request = share.request;
    item.q_start = t * p.q_tile.divisor;
    item.q_len = min(p.q_tile.divisor, entry.rows - item.q_start);
    item.kv_start = all.first_key(e) + c * chunk;
    item.kv_end = static_cast<u32>(min(static_cast<u64>(item.kv_start) + chunk, static_cast<u64>(share.end)));
    item.partial = FOLIO_NO_PARTIAL;
    if (entry.first_partial != FOLIO_NO_PARTIAL) {
        item.partial = partial_row(p, entry, item.q_start, c);
        if (static_cast<u64>(item.partial) + item.q_len > p.max_partial_rows) item.q_len = 0;
    }
    const i64 last_visible = past + item.q_start + item.q_len;
    const i64 visible = max(min(static_cast<i64>(item.kv_end), last_visible) - item.kv_start, 0ll);
    item.cost = static_cast<u32>(min(visible * item.q_len, 0xffffffffll));
    item.page_start = entry.page_start;
    item.q_token = static_cast<i32>(entry.q_token + item.q_start);
    item.position = static_cast<i32>(past + item.q_start);
    return item;
}

// Neighbouring records for every thread.
__device__ __forceinline__ Requests of_threads(Requests all, u32 count) {
    const u32 run = divide_up(count, blockDim.x);
    all.begin = min(threadIdx.x * run, count);
    all.end = min(all.begin + run, count);
    return all;
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_plan_cascade(const __grid_constant__ FolioPlanCascadeParams c) {
    using namespace folio;
    __shared__ FolioPlanRequest requests[SHARED_ENTRIES];
    __shared__ FolioPlanShare shares[SHARED_ENTRIES];
    __shared__ u32 first_item[SHARED_ENTRIES], first_combine[SHARED_ENTRIES];
    wait_for_prerequisites();
    const FolioPlanParams &p = c.plan;
    const u32 count = p.batch_size + c.num_segments;
    const bool is_small = count <= SHARED_ENTRIES;
    const Requests records = {is_small ? requests : p.requests, is_small ? first_item : p.first_item,
                              is_small ? first_combine : p.first_combine, 0, 0};
    const Entries all = {of_threads(records, count), is_small ? shares : c.shares, p.batch_size, count};
    Tiling &tiling = read_lengths(p, {}, of_threads(records, p.batch_size)).tiling;
    measure_segments(c, all);
    const Batch batch = share_keys(c, tiling, all);
    const u32 units =
        p.invariant_chunk ? p.invariant_chunk / p.kv_unit : smallest_chunk(p, all.requests, batch, p.least_gain);
    const u32 chunk = min(units, NOT_SPLIT / p.kv_unit) * p.kv_unit;
    const Counts counts = lay_out(p, all, chunk);
    write_combines(p, all, counts.combines);
    const float largest = cost_of(p, min(units, batch.most_units), batch.most_rows);
    const auto by_cost = [&](u32 index) {
        const FolioWorkItem item = make_item(p, all, index, chunk);
        return WeighedItem{item, item.cost};
    };
    write_items(p, counts.items, by_cost, CLASSES / (largest + 1.0f));
}
