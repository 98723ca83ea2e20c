// Cuts a batch whose lengths are on the device. The rules are those of src/plan/schedule.rs; only the order of items is
// coarser (sixteen classes, the natural order within a class).
#include "plan/planning.cuh"

namespace folio {

// Requests that are kept in shared memory; larger batches are kept in the workspace.
constexpr u32 SHARED_REQUESTS = 1024;

// Where each request's items, combine items and partial results start. Every split row has as many partial rows as its
// request has chunks, so the list of partial rows has the layout of the partial rows themselves.
__device__ __forceinline__ Counts lay_out(const FolioPlanParams &p, const Requests &all, u32 chunk) {
    __shared__ BlockScan<2> scan;
    u64 sums[2] = {};  // items, and combine items above bit 32; partial rows
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) {
        FolioPlanRequest &request = all.request[b];
        const u32 chunks = max(1u, divide_up(request.keys, chunk));
        request.chunks = chunks;
        sums[0] += static_cast<u64>(request.tiles) * chunks;
        if (chunks > 1) {
            sums[0] += static_cast<u64>(request.rows) << 32, sums[1] += static_cast<u64>(request.rows) * chunks;
        }
    }
    scan.exclusive(sums);
#pragma unroll 1
    for (u32 b = all.begin; b < all.end; b++) {
        FolioPlanRequest &request = all.request[b];
        all.first_item[b] = static_cast<u32>(sums[0]);
        all.first_combine[b] = static_cast<u32>(sums[0] >> 32);
        request.first_partial = static_cast<u32>(sums[1]);
        sums[0] += static_cast<u64>(request.tiles) * request.chunks;
        if (request.chunks > 1) {
            sums[0] += static_cast<u64>(request.rows) << 32;
            sums[1] += static_cast<u64>(request.rows) * request.chunks;
        }
    }
    const Counts counts = store_counts(p, scan.totals[0] & 0xffffffffull, scan.totals[0] >> 32);
    __syncthreads();
    return counts;
}

// Row r of chunk c of a tile lies c times the tile's rows after row r of its first chunk. A row whose parts do not all
// fit in the workspace is dropped: it has none.
__device__ __forceinline__ void write_combines(const FolioPlanParams &p, const Requests &all, u32 num_combines) {
#pragma unroll 1
    for (u32 n = threadIdx.x; n < num_combines; n += blockDim.x) {
        const u32 index = find(all.first_combine, p.batch_size, n);
        const FolioPlanRequest &request = all.request[index];
        const u32 row = n - all.first_combine[index], tile = divide(row, p.q_tile);
        const u32 q_start = tile * p.q_tile.divisor, q_len = min(p.q_tile.divisor, request.rows - q_start);
        const u32 of_tile = request.first_partial + q_start * request.chunks;
        const u32 first = request.first_partial + row * request.chunks;
        const u32 count = of_tile + q_len * request.chunks <= p.max_partial_rows ? request.chunks : 0;
        store_record(p.combines + n, FolioCombineItem{static_cast<u32>(request.q_token) + row, first, count, 0});
        for (u32 c = 0; c < count; c++) p.partials[first + c] = of_tile + c * q_len + row - q_start;
    }
}

// Item `index` in natural order: by request, tile, chunk. Prefill takes a request's last tile first, as it
// sees the most keys.
__device__ __forceinline__ FolioWorkItem make_item(const FolioPlanParams &p, const Requests &all, u32 index,
                                                   u32 chunk) {
    FolioWorkItem item = {};
    item.request = find(all.first_item, p.batch_size, index);
    const FolioPlanRequest &request = all.request[item.request];
    const u32 within = index - all.first_item[item.request], t = within / request.chunks,
              c = within - t * request.chunks;
    item.q_start = (p.by_request ? request.tiles - 1 - t : t) * p.q_tile.divisor;
    item.q_len = min(p.q_tile.divisor, request.rows - item.q_start);
    item.kv_start = c * chunk;
    item.kv_end = static_cast<u32>(min(static_cast<u64>(chunk) * (c + 1), static_cast<u64>(request.keys)));
    item.partial = FOLIO_NO_PARTIAL;
    if (request.chunks > 1) {
        item.partial = request.first_partial + item.q_start * request.chunks + c * item.q_len;
        if (item.partial + item.q_len > p.max_partial_rows) item.q_len = 0;
    }
    const i64 last_visible = static_cast<i64>(request.keys) - request.rows + item.q_start + item.q_len;
    const i64 visible = max(min(static_cast<i64>(item.kv_end), last_visible) - item.kv_start, 0ll);
    item.cost = static_cast<u32>(min(visible * item.q_len, 0xffffffffll));
    item.page_start = request.page_start;
    item.q_token = static_cast<i32>(request.q_token + item.q_start);
    item.position = static_cast<i32>(request.keys - request.rows + item.q_start);
    return item;
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1) folio_plan(const __grid_constant__ FolioPlanParams p) {
    using namespace folio;
    __shared__ FolioPlanRequest requests[SHARED_REQUESTS];
    __shared__ u32 first_item[SHARED_REQUESTS], first_combine[SHARED_REQUESTS];
    wait_for_prerequisites();
    const bool is_small = p.batch_size <= SHARED_REQUESTS;
    const u32 run = divide_up(p.batch_size, blockDim.x), begin = min(threadIdx.x * run, p.batch_size);
    const Requests all = {is_small ? requests : p.requests, is_small ? first_item : p.first_item,
                          is_small ? first_combine : p.first_combine, begin, min(begin + run, p.batch_size)};
    const Batch batch = read_lengths(p, all);
    const u32 chunk = p.invariant_chunk ? p.invariant_chunk : smallest_chunk(p, all, batch);
    const Counts counts = lay_out(p, all, chunk);
    write_combines(p, all, counts.combines);
    const float largest = p.by_request
                              ? static_cast<float>(batch.longest)
                              : static_cast<float>(min(chunk, batch.longest)) * static_cast<float>(batch.most_rows);
    const auto item = [&](u32 index) { return make_item(p, all, index, chunk); };
    write_items(p, all, counts.items, item, CLASSES / (largest + 1.0f));
}
