// Lists the slots of every branch of a draft for each of its steps; some blocks take a step. A list that is full ends, and
// so does kv_indptr.
#include "core/groups.cuh"

namespace folio {

typedef FolioDraftKvIndicesParams Params;

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

// A request: its row, or -1, and its tokens without drafts.
struct Request {
    i64 row;
    u32 keys;

    __device__ __forceinline__ Request() : row(-1), keys(0) {}

    __device__ __forceinline__ Request(const Params &p, u32 b) {
        const i64 most = min(p.rows.table.columns, MOST_INT32);
        const u32 len = min(length_of(p.kv_len, b), static_cast<u32>(most));
        row = row_of(p.rows, b);
        keys = row < 0 ? 0 : len;
    }

    // Elements of each branch in a step.
    __device__ __forceinline__ i64 count(u32 step) const { return keys + step + 1ll; }
};

// Lists those tokens of a request that are `done` and up for a branch, as far as a piece goes; by a warp.
__device__ __forceinline__ void put_tokens(const Params &p, u32 step, i64 row, const Span &span, i32 done) {
    const i32 count = static_cast<i32>(span.end - span.begin);
    if (p.rows.table.bytes == 4 && p.kv_indices.bytes == 4) {
        const i32 *const slots = static_cast<const i32 *>(p.rows.table.data) + row * p.rows.table.stride;
        i32 *const out = static_cast<i32 *>(p.kv_indices.data) + step * p.kv_indices.stride + span.begin;
        put_piece(out, done, count, [&](i32 i) { return quad_of(slots, i, count); });
        return;
    }
    const i32 end = min(done + static_cast<i32>(PIECE), count);
#pragma unroll 1
    for (i32 i = max(done, 0) + static_cast<i32>(threadIdx.x % LANES); i < end; i += LANES) {
        put_id(p.kv_indices, step, span.begin + i, get(p.rows.table, row, i));
    }
}

// Lists what was drafted of a request, whose branches begin at `begin`; by a warp, whose lanes take branches and steps.
__device__ __forceinline__ void put_drafted(const Params &p, u32 step, const Request &request, i64 begin) {
    const u32 drafted = step + 1;
#pragma unroll 1
    for (u32 i = threadIdx.x % LANES; i < p.topk * drafted; i += LANES) {
        const u32 branch = i / drafted, index = i - branch * drafted;
        const i64 at = begin + branch * request.count(step) + request.keys + index;
        const i64 entry = entry_of(p, request.keys, index, branch);
        const bool is_there = request.row >= 0 && entry < p.rows.table.columns;
        if (at < p.kv_indices.columns)
            put_id(p.kv_indices, step, at, is_there ? get(p.rows.table, request.row, entry) : -1);
    }
}

// By one of the group's warps. The branches of the lane's request begin at `end`.
__device__ __forceinline__ void put_indptr(const Params &p, u32 step, const Group &group, i64 count, i64 end) {
    const i64 capacity = p.kv_indices.columns;
    const u32 b = group.request();
    if (b == 0) put(p.kv_indptr, step, 0, 0);
    if (b < p.batch_size) {
#pragma unroll 1
        for (u32 branch = 0; branch < p.topk; branch++) {
            end += count;
            put(p.kv_indptr, step, static_cast<i64>(b) * p.topk + branch + 1, min(end, capacity));
        }
    }
    if (group.first() + LANES < p.batch_size) return;
    // What is beyond the batch.
    const i64 total = min(__shfl_sync(FULL_WARP, end, LANES - 1), capacity);
    const i64 beyond = static_cast<i64>(p.batch_size) * p.topk + 1;
#pragma unroll 1
    for (i64 i = beyond + threadIdx.x % LANES; i < p.kv_indptr.columns; i += LANES) put(p.kv_indptr, step, i, total);
}

__device__ __forceinline__ void list(const Params &p) {
    const u32 step = divide(blockIdx.x, p.blocks);
    const Group group(blockIdx.x - step * p.blocks.divisor, p.parts);
    const bool is_request = group.request() < p.batch_size;
    const Request own = is_request ? Request(p, group.request()) : Request();
    const i64 begin = group.before(is_request ? own.count(step) * p.topk : 0,
                                   [&](u32 b) { return Request(p, b).count(step) * p.topk; });
    if (group.warp() + 1 == group.warps()) put_indptr(p, step, group, own.count(step), begin);
    // The first piece of a request is what was drafted of it. The others are as many for each branch, whatever its lead.
    const auto pieces_of = [](u32 keys) { return (keys + LANES - 1 + PIECE - 1) / PIECE; };
    group.each_piece(is_request ? 1 + p.topk * pieces_of(own.keys) : 0, [&](u32 lane, u32 piece) {
        Request request;
        request.row = __shfl_sync(FULL_WARP, own.row, lane);
        request.keys = __shfl_sync(FULL_WARP, own.keys, lane);
        const i64 first = __shfl_sync(FULL_WARP, begin, lane);
        if (piece == 0) {
            put_drafted(p, step, request, first);
            return;
        }
        const u32 pieces = pieces_of(request.keys), branch = (piece - 1) / pieces;
        Span span;
        span.begin = first + branch * request.count(step);
        span.end = min(span.begin + request.keys, p.kv_indices.columns);
        const i32 done = static_cast<i32>((piece - 1 - branch * pieces) * PIECE) - span.lead(p.kv_indices, step);
        if (span.begin + done < span.end) put_tokens(p, step, request.row, span, done);
    });
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_draft_kv_indices(const __grid_constant__ FolioDraftKvIndicesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 bytes =
        p.rows.table.bytes | p.rows.row_ids.bytes | p.kv_len.bytes | p.kv_indptr.bytes | p.kv_indices.bytes;
    if (bytes != 4) {
        list(p);
        return;
    }
    // As in kv_indices.cu: code of one width.
    FolioDraftKvIndicesParams narrow = p;
    narrow.rows.table.bytes = narrow.rows.row_ids.bytes = narrow.kv_len.bytes = 4;
    narrow.kv_indptr.bytes = narrow.kv_indices.bytes = 4;
    list(narrow);
}
