// Cuts a batch whose lengths are on the device. The rules are those of src/plan/schedule.rs, of its chunks and of its equal
// shares. But all tiles of a request are cut alike, and the order of items is coarser (sixteen classes, the natural order
// within a class). Workers take whole shares where every request has one tile.
#include "plan/planning.cuh"

namespace folio {

// Requests that are kept in shared memory; larger batches are kept in the workspace.
constexpr u32 SHARED_REQUESTS = 1024;

// Where the keys of every request are cut: into chunks of one size, or at every multiple of a share of all their units. All
// tiles of a request are cut alike.
struct Cut {
    Reciprocal size;  // units
    bool is_shares;
    u32 fewest;  // units of the smallest piece

    // Units before the second piece, if there is one.
    __device__ __forceinline__ u32 first_cut(u32 units_before) const {
        if (!is_shares) return size.divisor;
        return size.divide_up(units_before + fewest) * size.divisor - units_before;
    }
    // The share of the first piece; each next one begins the share after it.
    __device__ __forceinline__ u32 share(u32 units_before) const { return size.divide(units_before + fewest - 1); }
    __device__ __forceinline__ u32 pieces(u32 first_cut, u32 units) const {
        if (!is_shares) return max(1u, size.divide_up(units));
        return units < first_cut + fewest ? 1 : size.divide(units - first_cut - fewest) + 2;
    }
};

// What a request adds to the plan. Every split row has as many partial rows as its request has pieces, so the list of
// partial rows has the layout of the partial rows themselves.
struct Added {
    u32 first_cut, pieces;
    u64 items, combines, partials;

    __device__ __forceinline__ Added(const Tiling &tiling, const FolioPlanRequest &request, const Cut &cut)
        : first_cut(cut.first_cut(request.units_before)),
          pieces(cut.pieces(first_cut, request.units)),
          items(static_cast<u64>(divide_up(request.rows, tiling.q_tile)) * pieces),
          combines(pieces > 1 ? request.rows : 0),
          partials(combines * pieces) {}
};

// Of a cut: what all requests add, and those before the thread's.
struct Counted {
    u64 before[2];  // items, and combine items above bit 32; partial rows
    u32 items, combines;

    __device__ __forceinline__ void add(const Added &added) {
        before[0] += added.items | added.combines << 32, before[1] += added.partials;
    }
};

__device__ __forceinline__ Counted count(const Tiling &tiling, const Requests &all, const Cut &cut) {
    __shared__ BlockScan<2> scan;
    Counted counted = {};
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) counted.add(Added(tiling, all.request[b], cut));
    scan.exclusive(counted.before);
    counted.items = static_cast<u32>(scan.totals[0]), counted.combines = static_cast<u32>(scan.totals[0] >> 32);
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

// Chunks of one size, or shares where those take much longer.
__device__ __forceinline__ Cut choose(const FolioPlanParams &p, const Requests &all, const Batch &batch,
                                      Counted &counted) {
    u32 units = p.invariant_chunk ? p.invariant_chunk / p.kv_unit : smallest_chunk(p, all, batch);
    bool is_shares = false;
#pragma unroll 1  // one copy of the code
    while (true) {
        const Cut cut = {Reciprocal(units), is_shares, fewest_units(p)};
        counted = count(batch.tiling, all, cut);
        if (is_shares || p.invariant_chunk) return cut;
        const u32 share = worthwhile_share(p, batch, units, counted);
        if (share == 0) return cut;
        units = share, is_shares = true;
    }
}

// Of each request the share of its first piece, and then how many shares are before it. Small batches are kept in shared
// memory, so that their places in the workspace are free.
__device__ __forceinline__ u32 *own_shares(const FolioPlanParams &p) { return p.first_item; }
__device__ __forceinline__ u32 *shares_before(const FolioPlanParams &p) { return p.first_combine; }

// Where each request's items, combine items and partial results start.
__device__ __forceinline__ Counts lay_out(const FolioPlanParams &p, const Tiling &tiling, const Requests &all,
                                          const Cut &cut, Counted counted) {
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) {
        FolioPlanRequest &request = all.request[b];
        const Added added(tiling, request, cut);
        if (cut.is_shares && p.order == FOLIO_PLAN_BY_SHARE) own_shares(p)[b] = cut.share(request.units_before);
        all.first_item[b] = static_cast<u32>(counted.before[0]);
        all.first_combine[b] = static_cast<u32>(counted.before[0] >> 32);
        request.first_partial = static_cast<u32>(counted.before[1]);
        request.first_cut = added.first_cut, request.pieces = added.pieces;
        counted.add(added);
    }
    const Counts counts = store_counts(p, tiling.workers_of_item, counted.items, counted.combines);
    __syncthreads();
    return counts;
}

// Row r of piece c of a tile lies c times the tile's rows after row r of its first piece. A row whose parts do not all
// fit in the workspace is dropped: it has none.
__device__ __forceinline__ void write_combines(const FolioPlanParams &p, const FolioDivisor &q_tile,
                                               const Requests &all, u32 num_combines) {
#pragma unroll 1
    for (u32 n = threadIdx.x; n < num_combines; n += blockDim.x) {
        const u32 index = find(all.first_combine, p.batch_size, n);
        const FolioPlanRequest &request = all.request[index];
        const u32 row = n - all.first_combine[index], tile = divide(row, q_tile);
        const u32 q_start = tile * q_tile.divisor, q_len = min(q_tile.divisor, request.rows - q_start);
        const u32 of_tile = request.first_partial + q_start * request.pieces;
        const u32 first = request.first_partial + row * request.pieces;
        const u32 count = of_tile + q_len * request.pieces <= p.max_partial_rows ? request.pieces : 0;
        store_record(p.combines + n, FolioCombineItem{static_cast<u32>(request.q_token) + row, first, count, 0});
        for (u32 c = 0; c < count; c++) p.partials[first + c] = of_tile + c * q_len + row - q_start;
    }
}

// What items are sorted by: in decode their cost; in prefill the request's keys, so that tiles that read the same keys stay
// together, or their own length where those are few rounds, as src/plan/schedule.rs has it.
enum class Weight { COST, KEYS_OF_REQUEST, LENGTH };

__device__ __forceinline__ Weight weight_of_items(const FolioPlanBatchParams &params, const Batch &batch,
                                                  u32 num_items) {
    if (params.plan.order != FOLIO_PLAN_BY_REQUEST) return Weight::COST;
    const Tiling &tiling = batch.tiling;
    const bool few =
        static_cast<u64>(num_items) * tiling.workers_of_item < static_cast<u64>(tiling.few_rounds) * params.workers.all;
    return few ? Weight::LENGTH : Weight::KEYS_OF_REQUEST;
}

// Item `index` in natural order: by request, tile, piece. Prefill takes a request's last tile first, as it
// sees the most keys.
__device__ __forceinline__ WeighedItem make_item(const FolioPlanParams &p, const FolioDivisor &q_tile,
                                                 const Requests &all, u32 index, u32 units, Weight weight) {
    FolioWorkItem item = {};
    item.request = find(all.first_item, p.batch_size, index);
    const FolioPlanRequest &request = all.request[item.request];
    const u32 within = index - all.first_item[item.request], t = within / request.pieces,
              c = within - t * request.pieces;
    item.q_start = (p.order == FOLIO_PLAN_BY_REQUEST ? divide_up(request.rows, q_tile) - 1 - t : t) * q_tile.divisor;
    item.q_len = min(q_tile.divisor, request.rows - item.q_start);
    const u32 first = first_key(p, request.rows, request.keys),
              next = first + (request.first_cut + c * units) * p.kv_unit;
    item.kv_start = c == 0 ? first : next - units * p.kv_unit;
    item.kv_end = c + 1 == request.pieces ? request.keys : next;
    item.partial = FOLIO_NO_PARTIAL;
    if (request.pieces > 1) {
        item.partial = request.first_partial + item.q_start * request.pieces + c * item.q_len;
        if (item.partial + item.q_len > p.max_partial_rows) item.q_len = 0;
    }
    const i64 last_visible = static_cast<i64>(request.keys) - request.rows + item.q_start + item.q_len;
    const i64 visible = max(min(static_cast<i64>(item.kv_end), last_visible) - item.kv_start, 0ll);
    item.cost = static_cast<u32>(min(visible * item.q_len, 0xffffffffll));
    item.page_start = request.page_start;
    item.q_token = static_cast<i32>(request.q_token + item.q_start);
    item.position = static_cast<i32>(request.keys - request.rows + item.q_start);
    u32 weighs = item.cost;
    if (weight == Weight::KEYS_OF_REQUEST) weighs = request.keys - first;
    if (weight == Weight::LENGTH) weighs = (static_cast<u32>(visible) + item.kv_end - item.kv_start) / 2;
    return {item, weighs};
}

// Set where the first piece of a request begins a share.
constexpr u32 BEGINS_SHARE = 1u << 31;

// Which pieces begin a share, those before which no piece has it; how many shares there are.
__device__ __forceinline__ u32 find_shares(const FolioPlanParams &p, const Requests &all) {
    __shared__ BlockScan<1> scan;
    u32 next = 0;  // share after the last that has a piece
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) {
        if (all.request[b].rows > 0) next = own_shares(p)[b] + all.request[b].pieces;
    }
    const u32 next_before = exclusive_maximum(next);
    u64 begun[1] = {};
    next = next_before;
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) {
        const FolioPlanRequest &request = all.request[b];
        if (request.rows == 0) continue;
        const u32 share = own_shares(p)[b], begins = share >= next;
        next = share + request.pieces;
        shares_before(p)[b] = begins ? BEGINS_SHARE : 0;
        begun[0] += request.pieces - 1 + begins;
    }
    scan.exclusive(begun);
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) {
        const FolioPlanRequest &request = all.request[b];
        if (request.rows == 0) continue;
        const u32 begins = shares_before(p)[b];
        shares_before(p)[b] = begins | static_cast<u32>(begun[0]);
        begun[0] += request.pieces - 1 + (begins > 0);
    }
    __syncthreads();
    return static_cast<u32>(scan.totals[0]);
}

// The first items of all shares, then the others, as src/plan/item_order.rs puts them; and where those of each share begin.
template <class MakeItem>
__device__ __forceinline__ void write_shares(const FolioPlanParams &p, const Requests &all, u32 num_items,
                                             u32 num_shares, const MakeItem &make_item) {
    u32 *const others = p.counts + FOLIO_NUM_COUNTS;
    if (threadIdx.x == 0) p.counts[FOLIO_COUNT_SHARES] = num_shares, others[num_shares] = num_items;
#pragma unroll 1
    for (u32 index = threadIdx.x; index < num_items; index += blockDim.x) {
        const FolioWorkItem item = make_item(index).item;
        const u32 piece = index - all.first_item[item.request], of_request = shares_before(p)[item.request];
        const u32 begins = of_request >> 31,
                  share = (of_request & ~BEGINS_SHARE) + (piece == 0 ? 0 : begins + piece - 1);
        const bool is_first = piece > 0 || begins;
        store_record(p.items + (is_first ? share : num_shares + index - share), item);
        if (is_first) others[share] = num_shares + index - share;
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_plan(const __grid_constant__ FolioPlanBatchParams params) {
    using namespace folio;
    const FolioPlanParams &p = params.plan;
    __shared__ FolioPlanRequest requests[SHARED_REQUESTS];
    __shared__ u32 first_item[SHARED_REQUESTS], first_combine[SHARED_REQUESTS];
    wait_for_prerequisites();
    const bool is_small = p.batch_size <= SHARED_REQUESTS;
    const u32 run = divide_up(p.batch_size, blockDim.x), begin = min(threadIdx.x * run, p.batch_size);
    const Requests all = {is_small ? requests : p.requests, is_small ? first_item : p.first_item,
                          is_small ? first_combine : p.first_combine, begin, min(begin + run, p.batch_size)};
    const Batch batch = read_lengths(p, params.workers, all);
    Counted counted;
    const Cut cut = choose(p, all, batch, counted);
    const Counts counts = lay_out(p, batch.tiling, all, cut, counted);
    write_combines(p, batch.tiling.q_tile, all, counts.combines);
    const u32 units = cut.size.divisor;
    const Weight weight = weight_of_items(params, batch, counts.items);
    const float largest =
        cost_of(p, weight == Weight::KEYS_OF_REQUEST ? batch.most_units : min(units, batch.most_units),
                weight == Weight::COST ? batch.most_rows : 1);
    const auto item = [&](u32 index) { return make_item(p, batch.tiling.q_tile, all, index, units, weight); };
    if (cut.is_shares && p.order == FOLIO_PLAN_BY_SHARE && counts.items == counted.items) {
        const u32 num_shares = find_shares(p, all);
        // The workspace has room for one more.
        if (num_shares <= batch.tiling.max_shares + 1) return write_shares(p, all, counts.items, num_shares, item);
    }
    write_items(p, counts.items, item, CLASSES / (largest + 1.0f));
}
