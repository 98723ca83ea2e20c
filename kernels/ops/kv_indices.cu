// Lists the pages or slots of every request. Some blocks take a request. A list that is full ends, and so does kv_indptr.
#include "core/integers.cuh"

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
        const i64 keys = min(length(p.kv_len, b), tokens_of_row(p.rows));
        i64 start = p.kv_start.data ? length(p.kv_start, b) : 0;
        if (p.window > 0) start = max(start, keys - p.window);
        if (start >= keys) return;
        kv_len = static_cast<u32>(keys);
        first = divide(static_cast<u32>(start), p.page_size);
        count = divide(kv_len - 1, p.page_size) + 1 - first;
    }

    __device__ __forceinline__ i64 last_page_len(const Params &p) const {
        return count == 0 ? 0 : kv_len - (first + count - 1) * p.page_size.divisor;
    }
};

// What a request's first block writes besides indices; that of the last one also what is beyond the batch.
__device__ __forceinline__ void put_lengths(const Params &p, u32 b, i64 end, const Listed &own) {
    if (threadIdx.x == 0) {
        if (b == 0) put(p.kv_indptr, 0, 0, 0);
        if (b < p.batch_size) {
            put(p.kv_indptr, 0, b + 1, end);
            if (p.last_page_len.data) put(p.last_page_len, 0, b, own.last_page_len(p));
        }
    }
    if (b + 1 < p.batch_size) return;
    for (i64 i = p.batch_size + 1ll + threadIdx.x; i < p.kv_indptr.columns; i += FOLIO_THREADS) {
        put(p.kv_indptr, 0, i, end);
    }
    if (!p.last_page_len.data) return;
    for (i64 i = p.batch_size + threadIdx.x; i < p.last_page_len.columns; i += FOLIO_THREADS) {
        put(p.last_page_len, 0, i, 0);
    }
}

__device__ __forceinline__ i64 index_of(const Params &p, const Listed &own, u32 index) {
    const i64 slot = slot_of(p.rows, own.row, index * p.page_size.divisor);
    return slot < 0 || p.page_size.divisor == 1 ? slot : slot / p.page_size.divisor;
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_kv_indices(const __grid_constant__ FolioKvIndicesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 b = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    const Listed own = b < p.batch_size ? Listed(p, b) : Listed();
    if (part > 0 && part * FOLIO_THREADS >= own.count) return;
    const i64 before = sum_before(b, [&](u32 other) { return static_cast<i64>(Listed(p, other).count); });
    const i64 capacity = p.kv_indices.columns;
    if (part == 0) put_lengths(p, b, min(before + own.count, capacity), own);
    for (u32 i = part * FOLIO_THREADS + threadIdx.x; i < own.count && before + i < capacity;
         i += p.parts * FOLIO_THREADS) {
        put_id(p.kv_indices, 0, before + i, index_of(p, own, own.first + i));
    }
}
