// Where the rows of requests begin that widen.cu and widen_stored.cu write, and work items that say so: the launch before
// theirs, on every device.
#include "core/starts.cuh"
#include "widen/chunks.cuh"

namespace folio {

typedef FolioWidenParams Params;

// Rows of a request. One without queries has none: there is no item that would say where its pages are.
__device__ __forceinline__ i64 rows_of(const Params &p, u32 b) {
    const bool asks = p.plan.qo_indptr[b + 1] > p.plan.qo_indptr[b];
    return asks ? (keys_of(p, b) + CHUNK - 1) / CHUNK * CHUNK : 0;
}

// Where a request's rows begin.
__device__ __forceinline__ i64 first_row_of(const Params &p, const Starts &starts, u32 request) {
    const u32 thread = request / starts.requests_of_thread;
    i64 row = starts.of_threads[thread];
#pragma unroll 1
    for (u32 b = starts.first_request(thread); b < request; b++) row += rows_of(p, b);
    return row;
}

__device__ __forceinline__ void place_requests(const Params &p, const Starts &starts) {
    i64 row = starts.of_threads[threadIdx.x];
#pragma unroll 1
    for (u32 b = starts.first_request(threadIdx.x); b < starts.first_request(threadIdx.x + 1); b++) {
        p.first_row[b] = static_cast<i32>(min(row, MOST_INT32));
        row += rows_of(p, b);
    }
    if (threadIdx.x == 0) p.first_row[starts.batch_size] = static_cast<i32>(min(starts.total(), MOST_INT32));
}

__device__ __forceinline__ void place_items(const Params &p, const Starts &starts) {
    const u32 num_items = p.plan.counts[FOLIO_COUNT_ITEMS];
    for (u32 i = blockIdx.x * FOLIO_THREADS + threadIdx.x; i < num_items; i += gridDim.x * FOLIO_THREADS) {
        FolioWorkItem item = p.plan.items[i];
        // Every request with rows has such an item. More than one say the same: keys before a window have none.
        if (item.q_start == 0) p.page_start[item.request] = item.page_start;
        item.page_start = first_row_of(p, starts, item.request);
        p.items[i] = item;
    }
}

}  // namespace folio

// Grid: any number of CTAs.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_widen_places(const __grid_constant__ FolioWidenParams p) {
    using namespace folio;
    allow_dependents();
    const Starts starts(p.plan.counts[FOLIO_COUNT_REQUESTS], [&](u32 b) { return rows_of(p, b); });
    if (blockIdx.x == 0) {
        place_requests(p, starts);
        for (u32 i = threadIdx.x; i < p.num_units; i += FOLIO_THREADS) p.units[i] = LEAST_UNIT;
    }
    place_items(p, starts);
}
