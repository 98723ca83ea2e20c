// Lists the pages or slots of every request. Threads take elements of the list, whoever's they are, so that neither one
// long request nor many short ones leave threads idle. A list that is full ends, and so does kv_indptr.
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

struct Count {
    const Params &p;

    __device__ __forceinline__ i64 operator()(u32 b) const { return Listed(p, b).count; }
};

// Index `index` of a row, counted from the first token on.
__device__ __forceinline__ i64 index_of(const Params &p, i64 row, u32 index) {
    if (p.page_size.divisor == p.rows.page_size.divisor) {
        const i64 page = get(p.rows.table, row, index);
        return has_slots(p.rows, page) && static_cast<i64>(page * p.page_size.divisor) >= 0 ? page : -1;
    }
    const i64 slot = slot_of(p.rows, row, index * p.page_size.divisor);
    return slot < 0 || p.page_size.divisor == 1 ? slot : slot / p.page_size.divisor;
}

// What of the list is a request's.
struct Span {
    i64 begin, end;
    i64 row;
    u32 first;
};

struct Spans {
    const Params &p;
    const Starts &starts;

    __device__ __forceinline__ Span at(i64 element) const {
        Span span;
        const Listed own(p, starts.find(element, span.begin, Count{p}));
        span.end = span.begin + own.count;
        span.row = own.row;
        span.first = own.first;
        return span;
    }

    __device__ __forceinline__ i64 id(const Span &span, i64 element) const {
        return id_in(p.kv_indices, index_of(p, span.row, span.first + static_cast<u32>(element - span.begin)));
    }
};

// All but the list.
__device__ __forceinline__ void put_lengths(const Params &p, const Starts &starts) {
    const i64 capacity = p.kv_indices.columns, thread = static_cast<i64>(blockIdx.x) * FOLIO_THREADS + threadIdx.x;
    const i64 threads = static_cast<i64>(gridDim.x) * FOLIO_THREADS;
    if (thread == 0) put(p.kv_indptr, 0, 0, 0);
    starts.each(blockIdx.x, gridDim.x, Count{p}, [&](u32 b, i64, i64 end) {
        put(p.kv_indptr, 0, b + 1, min(end, capacity));
        if (p.last_page_len.data) put(p.last_page_len, 0, b, Listed(p, b).last_page_len(p));
    });
    // What is beyond the batch.
    for (i64 i = p.batch_size + 1ll + thread; i < p.kv_indptr.columns; i += threads) {
        put(p.kv_indptr, 0, i, min(starts.total(), capacity));
    }
    if (!p.last_page_len.data) return;
    for (i64 i = p.batch_size + thread; i < p.last_page_len.columns; i += threads) put(p.last_page_len, 0, i, 0);
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_kv_indices(const __grid_constant__ FolioKvIndicesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const Starts starts(p.batch_size, Count{p});
    SpannedIds<Spans, Span> ids = {{p, starts}};
    TiledRow(p.kv_indices, 0, min(starts.total(), p.kv_indices.columns)).put_all(blockIdx.x, gridDim.x, ids);
    put_lengths(p, starts);
}
