// Cuts a batch whose lengths are on the device into work items, and puts these in order. The rules are those of
// src/plan/schedule.rs. But all tiles of a request that are cut are cut alike, and the order of items is coarser (sixteen
// classes, the natural order within a class). Workers take whole shares where every request has one tile.
#include "plan/cut.cuh"

namespace folio {

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
        const Added added(tiling.q_tile, all, b, cut);
        if (cut.kind == Cut::SHARES && p.order == FOLIO_PLAN_BY_SHARE)
            own_shares(p)[b] = cut.share(request.units_before);
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
                                               const Requests &all, const Cut &cut, u32 num_combines) {
#pragma unroll 1
    for (u32 n = threadIdx.x; n < num_combines; n += blockDim.x) {
        const u32 index = find(all.first_combine, p.batch_size, n);
        const FolioPlanRequest &request = all.request[index];
        const u32 whole_rows = cut.whole_tiles(index, divide_up(request.rows, q_tile)) * q_tile.divisor;
        const u32 row = whole_rows + n - all.first_combine[index], tile = divide(row, q_tile);
        const u32 q_start = tile * q_tile.divisor, q_len = min(q_tile.divisor, request.rows - q_start);
        const u32 of_tile = request.first_partial + (q_start - whole_rows) * request.pieces;
        const u32 first = request.first_partial + (row - whole_rows) * request.pieces;
        const u32 count = of_tile + q_len * request.pieces <= p.max_partial_rows ? request.pieces : 0;
        store_record(p.combines + n, FolioCombineItem{static_cast<u32>(request.q_token) + row, first, count, 0});
        for (u32 c = 0; c < count; c++) p.partials[first + c] = of_tile + c * q_len + row - q_start;
    }
}

// What items are sorted by: in decode their cost; in prefill the request's keys, so that tiles that read the same keys stay
// together, and the tail behind them; or their own length where those are few rounds, as src/plan/schedule.rs has it.
enum class Weight { COST, KEYS_OF_REQUEST, LENGTH };

__device__ __forceinline__ Weight weight_of_items(const FolioPlanBatchParams &params, const Batch &batch,
                                                  const Cut &cut, u32 num_items) {
    if (params.plan.order != FOLIO_PLAN_BY_REQUEST) return Weight::COST;
    const Tiling &tiling = batch.tiling;
    if (cut.kind == Cut::TAIL) return tiling.is_unequal ? Weight::LENGTH : Weight::KEYS_OF_REQUEST;
    const u64 few_rounds = tiling.is_unequal ? 8 : 4;
    const bool few = static_cast<u64>(num_items) * tiling.workers_of_item < few_rounds * params.workers.all;
    return few ? Weight::LENGTH : Weight::KEYS_OF_REQUEST;
}

// Item `index` in natural order: by request, tile, piece. Prefill takes a request's last tile first, as it
// sees the most keys.
__device__ __forceinline__ WeighedItem make_item(const FolioPlanParams &p, const Batch &batch, const Requests &all,
                                                 const Cut &cut, u32 index, Weight weight) {
    const FolioDivisor &q_tile = batch.tiling.q_tile;
    FolioWorkItem item = {};
    item.request = find(all.first_item, p.batch_size, index);
    const FolioPlanRequest &request = all.request[item.request];
    const u32 tiles = divide_up(request.rows, q_tile), whole = cut.whole_tiles(item.request, tiles),
              cut_items = (tiles - whole) * request.pieces;
    const u32 within = index - all.first_item[item.request];
    const bool is_whole = within >= cut_items;
    const u32 pieces = is_whole ? 1 : request.pieces;
    const u32 t = is_whole ? tiles - whole + within - cut_items : within / pieces,
              c = is_whole ? 0 : within - t * pieces;
    item.q_start = (p.order == FOLIO_PLAN_BY_REQUEST ? tiles - 1 - t : t) * q_tile.divisor;
    item.q_len = min(q_tile.divisor, request.rows - item.q_start);
    const u32 units = cut.size.divisor, first = first_key(p, request.rows, request.keys),
              next = first + (request.first_cut + c * units) * p.kv_unit;
    item.kv_start = c == 0 ? first : next - units * p.kv_unit;
    item.kv_end = c + 1 == pieces ? request.keys : next;
    item.partial = FOLIO_NO_PARTIAL;
    if (pieces > 1) {
        item.partial = request.first_partial + (item.q_start - whole * q_tile.divisor) * pieces + c * item.q_len;
        if (item.partial + item.q_len > p.max_partial_rows) item.q_len = 0;
    }
    const i64 last_visible = static_cast<i64>(request.keys) - request.rows + item.q_start + item.q_len;
    const i64 visible = max(min(static_cast<i64>(item.kv_end), last_visible) - item.kv_start, 0ll);
    item.cost = static_cast<u32>(min(visible * item.q_len, 0xffffffffll));
    item.page_start = request.page_start;
    item.q_token = static_cast<i32>(request.q_token + item.q_start);
    item.position = static_cast<i32>(request.keys - request.rows + item.q_start);
    u32 weighs = item.cost;
    if (weight == Weight::KEYS_OF_REQUEST) {
        weighs = request.keys - first;
        // A tail is the last class.
        if (cut.kind == Cut::TAIL) weighs = is_whole ? max(weighs, batch.most_units * p.kv_unit / CLASSES + 1) : 0;
    }
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
    Batch batch = read_lengths(p, params.workers, all);
    Counted counted;
    const Cut cut = choose(params, all, batch, counted);
    const Counts counts = lay_out(p, batch.tiling, all, cut, counted);
    write_combines(p, batch.tiling.q_tile, all, cut, counts.combines);
    const Weight weight = weight_of_items(params, batch, cut, counts.items);
    const bool has_whole = weight == Weight::KEYS_OF_REQUEST || cut.kind == Cut::TAIL;
    const float largest = cost_of(p, has_whole ? batch.most_units : min(cut.size.divisor, batch.most_units),
                                  weight == Weight::COST ? batch.most_rows : 1);
    const auto item = [&](u32 index) { return make_item(p, batch, all, cut, index, weight); };
    if (cut.kind == Cut::SHARES && p.order == FOLIO_PLAN_BY_SHARE && counts.items == counted.items) {
        const u32 num_shares = find_shares(p, all);
        // The workspace has room for one more.
        if (num_shares <= batch.tiling.max_shares + 1) return write_shares(p, all, counts.items, num_shares, item);
    }
    if (threadIdx.x == 0 && cut.kind == Cut::TAIL && weight == Weight::KEYS_OF_REQUEST) {
        p.counts[FOLIO_COUNT_SMALL_ITEMS] = counts.items - WholeTiles::of_block().count;
    }
    write_items(p, counts.items, item, CLASSES / (largest + 1.0f));
}
