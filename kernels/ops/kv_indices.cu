// Lists the pages or slots of every request. Warps take equal parts of the list, whoever's they are, so that neither one
// long request nor many short ones leave warps idle. A list that is full ends, and so does kv_indptr.
#include "core/quads.cuh"
#include "core/starts.cuh"

namespace folio {

typedef FolioKvIndicesParams Params;

// The indices of a request that are listed, and where its last page ends.
struct Listed {
    i64 row;
    u32 first, count, kv_len;

    __device__ __forceinline__ Listed() : row(-1), first(0), count(0), kv_len(0) {}

    __device__ __forceinline__ Listed(const Params &p, u32 b) : Listed() {
        row = row_of(p.rows, b);
        if (row < 0) return;
        const u32 keys = min(length_of(p.kv_len, b), static_cast<u32>(tokens_of_row(p.rows)));
        u32 start = p.kv_start.data ? length_of(p.kv_start, b) : 0;
        if (p.window > 0 && keys > p.window) start = max(start, keys - p.window);
        if (start >= keys) return;
        kv_len = keys;
        first = divide(start, p.page_size);
        count = divide(kv_len - 1, p.page_size) + 1 - first;
    }

    __device__ __forceinline__ i64 last_page_len(const Params &p) const {
        return count == 0 ? 0 : kv_len - (first + count - 1) * p.page_size.divisor;
    }
};

// Index `index` of a row, counted from the first token on.
__device__ __forceinline__ i64 index_of(const Params &p, i64 row, u32 index) {
    const i64 slot = slot_of(p.rows, row, index * p.page_size.divisor);
    return slot < 0 || p.page_size.divisor == 1 ? slot : slot / p.page_size.divisor;
}

// Lists indices of a row from `index` on, as elements `at` and up; by a warp.
__device__ __forceinline__ void put_indices(const Params &p, i64 row, u32 index, i64 at, u32 count) {
    if (p.rows.table.bytes == 4 && p.kv_indices.bytes == 4 && p.page_size.divisor <= p.rows.page_size.divisor) {
        const i32 *const pages = static_cast<const i32 *>(p.rows.table.data) + row * p.rows.table.stride;
        i32 *const out = static_cast<i32 *>(p.kv_indices.data) + at;
        if (p.page_size.divisor == p.rows.page_size.divisor) {
            put_quads<1>(out, count, [&](u32 i) { return max(__ldg(pages + index + i), -1); });
            return;
        }
        if (p.page_size.divisor == 1) {
            put_quads<2>(out, count, [&](u32 i) {
                const u32 token = index + i, column = divide(token, p.rows.page_size);
                const i32 page = __ldg(pages + column);
                const u64 first = static_cast<u64>(static_cast<u32>(page)) * p.rows.page_size.divisor;
                const u64 slot = first + (token - column * p.rows.page_size.divisor);
                return page < 0 || slot > MOST_INT32 ? -1 : static_cast<i32>(slot);
            });
            return;
        }
    }
#pragma unroll 1
    for (u32 i = threadIdx.x % LANES; i < count; i += LANES) {
        put_id(p.kv_indices, 0, at + i, index_of(p, row, index + i));
    }
}

// All of the list that is the warp's; by all blocks but the last.
__device__ __forceinline__ void put_list(const Params &p, const Starts &starts) {
    const WarpSpan span(min(starts.total(), p.kv_indices.columns), blockIdx.x, gridDim.x - 1);
    if (span.begin == span.end) return;
    i64 begin;
    u32 b = starts.at_or_before(span.begin, begin);
#pragma unroll 1
    for (i64 at = span.begin; at < span.end; b++) {
        const Listed own(p, b);
        const i64 end = min(begin + own.count, span.end);
        if (at < end) {
            put_indices(p, own.row, own.first + static_cast<u32>(at - begin), at, static_cast<u32>(end - at));
            at = end;
        }
        begin += own.count;
    }
}

// All but the list; by the last block, while others write the list.
__device__ __forceinline__ void put_lengths(const Params &p, const Starts &starts) {
    const i64 capacity = p.kv_indices.columns;
    if (threadIdx.x == 0) put(p.kv_indptr, 0, 0, 0);
    i64 end = starts.of_threads[threadIdx.x];
#pragma unroll 1
    for (u32 b = starts.first_request(threadIdx.x); b < starts.first_request(threadIdx.x + 1); b++) {
        const Listed own(p, b);
        end += own.count;
        put(p.kv_indptr, 0, b + 1, min(end, capacity));
        if (p.last_page_len.data) put(p.last_page_len, 0, b, own.last_page_len(p));
    }
    // What is beyond the batch.
#pragma unroll 1
    for (i64 i = p.batch_size + 1ll + threadIdx.x; i < p.kv_indptr.columns; i += FOLIO_THREADS) {
        put(p.kv_indptr, 0, i, min(starts.total(), capacity));
    }
    if (!p.last_page_len.data) return;
#pragma unroll 1
    for (i64 i = p.batch_size + threadIdx.x; i < p.last_page_len.columns; i += FOLIO_THREADS) {
        put(p.last_page_len, 0, i, 0);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_kv_indices(const __grid_constant__ FolioKvIndicesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const Starts starts(p.batch_size, [&](u32 b) { return Listed(p, b).count; });
    if (blockIdx.x + 1 < gridDim.x) {
        put_list(p, starts);
    } else {
        put_lengths(p, starts);
    }
}
