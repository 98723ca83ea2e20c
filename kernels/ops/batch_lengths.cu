// Sums up the lengths of a step. A thread takes a request; a block first sums up all requests before its own. What is
// beyond the batch is filled in as well.
#include "core/integers.cuh"

namespace folio {

typedef FolioBatchLengthsParams Params;

// What is counted of a request, and of several.
struct Lengths {
    i64 rows, keys;

    __device__ __forceinline__ Lengths() : rows(0), keys(0) {}

    __device__ __forceinline__ Lengths(const Params &p, u32 b) {
        rows = length(p.qo_len, b);
        const i64 cached = p.cached_len.data ? length(p.cached_len, b) : 0;
        keys = rows > 0 ? min(cached + rows, MOST_INT32) : 0;
    }

    // Those before request `end`, as many as this thread adds up; several are loaded at a time.
    static __device__ __forceinline__ Lengths before(const Params &p, u32 end) {
        constexpr u32 AT_ONCE = 4;
        Lengths sum;
        for (u32 b = threadIdx.x; b < end; b += AT_ONCE * FOLIO_THREADS) {
#pragma unroll
            for (u32 i = 0; i < AT_ONCE; i++) {
                const u32 at = b + i * FOLIO_THREADS;
                const Lengths one(p, min(at, end - 1));
                sum.rows += at < end ? one.rows : 0;
                sum.keys += at < end ? one.keys : 0;
            }
        }
        return sum;
    }
};

// src/problem/index.rs: RowKind.
__device__ __forceinline__ i64 kind_of(const Params &p, u32 b, i64 rows) {
    return rows == 0 ? 0 : get(p.encoder_len, 0, b) > 0 ? 1 : 2;
}

__device__ __forceinline__ void put_sums(const FolioIntegers &indptr, u32 at, i64 before, i64 own) {
    const i64 sum = BlockSums(before).all + BlockSums(own).before;
    if (at < indptr.columns) put_count(indptr, 0, at, sum);
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_batch_lengths(const __grid_constant__ FolioBatchLengthsParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 first = blockIdx.x * FOLIO_THREADS, at = first + threadIdx.x;
    const bool is_request = at < p.batch_size;
    const Lengths own = is_request ? Lengths(p, at) : Lengths();
    const Lengths before = Lengths::before(p, min(first, p.batch_size));
    if (p.kv_len.data && at < p.kv_len.columns) put(p.kv_len, 0, at, own.keys);
    if (p.row_kind.data && at < p.row_kind.columns) put(p.row_kind, 0, at, is_request ? kind_of(p, at, own.rows) : 0);
    if (p.qo_indptr.data) put_sums(p.qo_indptr, at, before.rows, own.rows);
    if (p.kv_indptr.data) put_sums(p.kv_indptr, at, before.keys, own.keys);
}
