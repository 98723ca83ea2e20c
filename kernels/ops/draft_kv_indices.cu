// Lists the slots of every branch of a draft for each of its steps. Some blocks take a step, and their threads elements of
// its list, whoever's they are. A list that is full ends, and so does kv_indptr.
#include "core/quads.cuh"
#include "core/starts.cuh"

namespace folio {

typedef FolioDraftKvIndicesParams Params;

// Tokens of a request without drafts.
__device__ __forceinline__ u32 keys_of(const Params &p, u32 b) {
    return row_of(p.rows, b) < 0 ? 0 : static_cast<u32>(min(length(p.kv_len, b), p.rows.table.columns));
}

// src/problem/index.rs: DraftSlots::entry.
__device__ __forceinline__ i64 entry_of(const Params &p, u32 kv_len, u32 step, u32 branch) {
    switch (p.slot_layout) {
        case FOLIO_DRAFT_STEP_MAJOR: return kv_len + static_cast<i64>(step) * p.topk + branch;
        case FOLIO_DRAFT_BRANCH_MAJOR: return kv_len + static_cast<i64>(branch) * p.num_steps + step;
        default: break;
    }
    const i64 slots = static_cast<i64>(kv_len % p.page_size) + p.num_steps;
    const i64 pages = (slots + p.page_size - 1) / p.page_size;
    return kv_len + branch * pages * p.page_size + step;
}

// The elements of all branches of a request.
struct Count {
    const Params &p;
    u32 step;

    __device__ __forceinline__ i64 of_branch(u32 b) const { return keys_of(p, b) + step + 1ll; }
    __device__ __forceinline__ i64 operator()(u32 b) const { return of_branch(b) * p.topk; }
};

// What of a step's list is a branch's.
struct Span {
    i64 begin, end;
    i64 row;
    u32 keys, branch;
};

struct Spans {
    const Params &p;
    const Starts &starts;
    Count count;

    __device__ __forceinline__ Span at(i64 element) const {
        i64 begin;
        const u32 b = starts.find(element, begin, count);
        const i64 of_branch = count.of_branch(b);
        u32 branch = 0;
        for (; element - begin >= of_branch; begin += of_branch) branch++;
        return {begin, begin + of_branch, row_of(p.rows, b), static_cast<u32>(of_branch - count.step - 1), branch};
    }

    __device__ __forceinline__ i64 id(const Span &span, i64 element) const {
        const u32 index = static_cast<u32>(element - span.begin);
        const i64 entry = index < span.keys ? index : entry_of(p, span.keys, index - span.keys, span.branch);
        const bool is_there = span.row >= 0 && entry < p.rows.table.columns;
        return is_there ? id_in(p.kv_indices, get(p.rows.table, span.row, entry)) : -1;
    }
};

__device__ __forceinline__ void put_indptr(const Params &p, const Starts &starts, const Count &count, u32 step) {
    const i64 capacity = p.kv_indices.columns, branches = static_cast<i64>(p.batch_size) * p.topk;
    const u32 part = blockIdx.x - step * p.parts;
    if (part == 0 && threadIdx.x == 0) put(p.kv_indptr, step, 0, 0);
    const u32 threads = p.parts * FOLIO_THREADS, thread = part * FOLIO_THREADS + threadIdx.x;
    starts.each(part, p.parts, count, [&](u32 b, i64 begin, i64 end) {
        const i64 of_branch = count.of_branch(b);
        for (u32 branch = 0; branch < p.topk; branch++) {
            begin += of_branch;
            put(p.kv_indptr, step, static_cast<i64>(b) * p.topk + branch + 1, min(begin, capacity));
        }
    });
    for (i64 i = branches + 1 + thread; i < p.kv_indptr.columns; i += threads) {
        put(p.kv_indptr, step, i, min(starts.total(), capacity));
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_draft_kv_indices(const __grid_constant__ FolioDraftKvIndicesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 step = blockIdx.x / p.parts, part = blockIdx.x - step * p.parts;
    const Count count = {p, step};
    const Starts starts(p.batch_size, count);
    SpannedIds<Spans, Span> ids = {{p, starts, count}};
    TiledRow(p.kv_indices, step, min(starts.total(), p.kv_indices.columns)).put_all(part, p.parts, ids);
    put_indptr(p, starts, count, step);
}
