// Sums up the lengths of a step. A thread takes a request; a block first sums up all requests before its own. What is
// beyond the batch is filled in as well.
#include "core/integers.cuh"

namespace folio {

typedef FolioBatchLengthsParams Params;

__device__ __forceinline__ i64 rows_of(const Params &p, u32 b) { return length(p.qo_len, b); }

__device__ __forceinline__ i64 keys_of(const Params &p, u32 b) {
    const i64 rows = rows_of(p, b), cached = p.cached_len.data ? length(p.cached_len, b) : 0;
    return rows > 0 ? min(cached + rows, MOST_INT32) : 0;
}

// src/problem/index.rs: RowKind.
__device__ __forceinline__ i64 kind_of(const Params &p, u32 b) {
    return rows_of(p, b) == 0 ? 0 : get(p.encoder_len, 0, b) > 0 ? 1 : 2;
}

template <class Length>
__device__ __forceinline__ void put_sums(const Params &p, const FolioIntegers &indptr, u32 first,
                                         const Length &length) {
    const u32 at = first + threadIdx.x;
    const i64 before = sum_before(min(first, p.batch_size), length);
    const i64 sum = before + block_exclusive(at < p.batch_size ? length(at) : 0);
    if (at < indptr.columns) put_count(indptr, 0, at, sum);
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_batch_lengths(const __grid_constant__ FolioBatchLengthsParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 first = blockIdx.x * FOLIO_THREADS, at = first + threadIdx.x;
    if (p.qo_indptr.data) put_sums(p, p.qo_indptr, first, [&](u32 b) { return rows_of(p, b); });
    if (p.kv_indptr.data) put_sums(p, p.kv_indptr, first, [&](u32 b) { return keys_of(p, b); });
    const bool is_request = at < p.batch_size;
    if (p.kv_len.data && at < p.kv_len.columns) put(p.kv_len, 0, at, is_request ? keys_of(p, at) : 0);
    if (p.row_kind.data && at < p.row_kind.columns) put(p.row_kind, 0, at, is_request ? kind_of(p, at) : 0);
}
