// Lists the slots of every branch of a draft for each of its steps. Some blocks take a branch in a step. A list that is
// full ends, and so does kv_indptr.
#include "core/integers.cuh"

namespace folio {

typedef FolioDraftKvIndicesParams Params;

// Tokens of a request without drafts.
__device__ __forceinline__ i64 keys_of(const Params &p, u32 b) {
    return row_of(p.rows, b) < 0 ? 0 : min(length(p.kv_len, b), p.rows.table.columns);
}

// src/problem/index.rs: DraftSlots::entry.
__device__ __forceinline__ i64 entry_of(const Params &p, i64 kv_len, i64 step, i64 branch) {
    switch (p.slot_layout) {
        case FOLIO_DRAFT_STEP_MAJOR: return kv_len + step * p.topk + branch;
        case FOLIO_DRAFT_BRANCH_MAJOR: return kv_len + branch * p.num_steps + step;
        default: break;
    }
    const i64 page_size = p.page_size, pages = (kv_len % page_size + p.num_steps + page_size - 1) / page_size;
    return kv_len + branch * pages * page_size + step;
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_draft_kv_indices(const __grid_constant__ FolioDraftKvIndicesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    // An empty batch has a block in each step, too.
    const u32 branches = p.batch_size * p.topk, rows = max(branches, 1u);
    const u32 part = blockIdx.x % p.parts, step = blockIdx.x / p.parts / rows, at = blockIdx.x / p.parts % rows;
    const u32 b = at / p.topk, branch = at % p.topk;
    const bool is_request = at < branches;
    const i64 keys = is_request ? keys_of(p, b) : 0, count = is_request ? keys + step + 1 : 0;
    if (part > 0 && part * FOLIO_THREADS >= count) return;
    const i64 of_requests = sum_before(b, [&](u32 other) { return keys_of(p, other) + step + 1; });
    const i64 before = of_requests * p.topk + branch * count, capacity = p.kv_indices.columns;
    if (part == 0) {
        const i64 end = min(before + count, capacity);
        if (threadIdx.x == 0 && at == 0) put(p.kv_indptr, step, 0, 0);
        if (threadIdx.x == 0 && is_request) put(p.kv_indptr, step, at + 1, end);
        if (at + 1 >= branches) {
            for (i64 i = branches + 1ll + threadIdx.x; i < p.kv_indptr.columns; i += FOLIO_THREADS) {
                put(p.kv_indptr, step, i, end);
            }
        }
    }
    const i64 row = is_request ? row_of(p.rows, b) : -1;
    for (i64 i = part * FOLIO_THREADS + threadIdx.x; i < count && before + i < capacity; i += p.parts * FOLIO_THREADS) {
        const i64 entry = i < keys ? i : entry_of(p, keys, i - keys, branch);
        const bool is_there = row >= 0 && entry < p.rows.table.columns;
        put_id(p.kv_indices, step, before + i, is_there ? get(p.rows.table, row, entry) : -1);
    }
}
