// Lists the slots of every branch of a draft for each of its steps. Some blocks take a step, and their warps equal parts of
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

// A branch of a request in a step, and its elements: the request's tokens and those that were drafted.
struct Branch {
    i64 row;
    u32 keys, index;
    i64 count;

    __device__ __forceinline__ Branch(const Params &p, u32 step, u32 b, u32 index)
        : row(row_of(p.rows, b)), keys(keys_of(p, b)), index(index), count(keys + step + 1ll) {}
};

__device__ __forceinline__ i64 slot_of(const Params &p, const Branch &branch, u32 index) {
    const i64 entry = index < branch.keys ? index : entry_of(p, branch.keys, index - branch.keys, branch.index);
    return branch.row >= 0 && entry < p.rows.table.columns ? get(p.rows.table, branch.row, entry) : -1;
}

// Lists slots of a branch from `index` on, as elements `at` and up; by a warp.
__device__ __forceinline__ void put_slots(const Params &p, u32 step, const Branch &branch, u32 index, i64 at,
                                          u32 count) {
    u32 done = 0;
    if (p.rows.table.bytes == 4 && p.kv_indices.bytes == 4 && index < branch.keys) {
        const i32 *const slots = static_cast<const i32 *>(p.rows.table.data) + branch.row * p.rows.table.stride + index;
        i32 *const out = static_cast<i32 *>(p.kv_indices.data) + step * p.kv_indices.stride + at;
        done = min(count, branch.keys - index);
        put_quads<4>(out, done, [&](u32 i) { return max(__ldg(slots + i), -1); });
    }
#pragma unroll 1
    for (u32 i = done + threadIdx.x % LANES; i < count; i += LANES) {
        put_id(p.kv_indices, step, at + i, slot_of(p, branch, index + i));
    }
}

// All of a step's list that is the warp's; by all blocks of the step but the last.
__device__ __forceinline__ void put_list(const Params &p, const Starts &starts, u32 step, u32 part) {
    const WarpSpan span(min(starts.total(), p.kv_indices.columns), part, p.parts - 1);
    if (span.begin == span.end) return;
    i64 begin;
    u32 b = starts.at_or_before(span.begin, begin), index = 0;
#pragma unroll 1
    for (i64 at = span.begin; at < span.end;) {
        const Branch branch(p, step, b, index);
        const i64 end = min(begin + branch.count, span.end);
        if (at < end) {
            put_slots(p, step, branch, static_cast<u32>(at - begin), at, static_cast<u32>(end - at));
            at = end;
        }
        begin += branch.count;
        if (++index == p.topk) b++, index = 0;
    }
}

// By the last block of the step, while others write the list.
__device__ __forceinline__ void put_indptr(const Params &p, const Starts &starts, u32 step) {
    const i64 capacity = p.kv_indices.columns;
    if (threadIdx.x == 0) put(p.kv_indptr, step, 0, 0);
    i64 end = starts.of_threads[threadIdx.x];
#pragma unroll 1
    for (u32 b = starts.first_request(threadIdx.x); b < starts.first_request(threadIdx.x + 1); b++) {
        const i64 count = Branch(p, step, b, 0).count;
#pragma unroll 1
        for (u32 index = 0; index < p.topk; index++) {
            end += count;
            put(p.kv_indptr, step, static_cast<i64>(b) * p.topk + index + 1, min(end, capacity));
        }
    }
    const i64 beyond = static_cast<i64>(p.batch_size) * p.topk + 1;
#pragma unroll 1
    for (i64 i = beyond + threadIdx.x; i < p.kv_indptr.columns; i += FOLIO_THREADS) {
        put(p.kv_indptr, step, i, min(starts.total(), capacity));
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_draft_kv_indices(const __grid_constant__ FolioDraftKvIndicesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 step = blockIdx.x / p.parts, part = blockIdx.x - step * p.parts;
    const Starts starts(p.batch_size, [&](u32 b) { return Branch(p, step, b, 0).count * p.topk; });
    if (part + 1 < p.parts) {
        put_list(p, starts, step, part);
    } else {
        put_indptr(p, starts, step);
    }
}
