// Keys and values of a batch to dense 16-bit rows, request after request, which the Hopper prefill kernel then reads as ragged
// ones: widened from an fp8 cache, or copied from small pages; from caches in other forms by widen_stored.cu. Every tile of
// queries brings the keys that it reads in this form, unless that was done before: with many tiles that is cheaper. It comes
// after places.cu. Another launch makes rows of queries in fp8. No products.
#include "widen/chunks.cuh"

namespace folio {

typedef FolioWidenParams Params;

// Eight elements, as they are stored and as they are in a row.
template <class Stored, class Wanted>
struct Widening {
    typedef uint2 Piece;
    static __device__ __forceinline__ uint4 of(uint2 in) {
        return make_uint4(Stored::template widen<Wanted, 0, 1>(in.x), Stored::template widen<Wanted, 2, 3>(in.x),
                          Stored::template widen<Wanted, 0, 1>(in.y), Stored::template widen<Wanted, 2, 3>(in.y));
    }
};
// By the instruction for it, which keeps NaN.
template <>
struct Widening<e4m3, f16> {
    typedef uint2 Piece;
    static __device__ __forceinline__ u32 pair(u32 bytes) {
        u32 y;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(static_cast<u16>(bytes)));
        return y;
    }
    static __device__ __forceinline__ uint4 of(uint2 in) {
        return make_uint4(pair(in.x), pair(in.x >> 16), pair(in.y), pair(in.y >> 16));
    }
};
template <class T>
struct Widening<T, T> {
    typedef uint4 Piece;
    static __device__ __forceinline__ uint4 of(uint4 in) { return in; }
};

// What a warp widens of Q, K or V: a lane's row where it is stored, or null where there is none, and the first of the
// chunk's rows to write, `apart` rows from one to the next.
template <class Stored, class Wanted>
__device__ __forceinline__ void widen_chunk(const typename Stored::Storage *from, u16 *to, u32 pieces, u32 apart) {
    typedef Widening<Stored, Wanted> Wide;
    typedef typename Wide::Piece Piece;
    constexpr u32 AT_ONCE = 8;
    const u32 lane = threadIdx.x % LANES;
    uint4 *const rows = reinterpret_cast<uint4 *>(to);
    // Exact: numbers below 1280 by at most 32.
    const u32 reciprocal = (65536 + pieces - 1) / pieces;
#pragma unroll 1
    for (u32 first = 0; first < pieces; first += AT_ONCE) {
        Piece in[AT_ONCE];
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) {
            const u32 index = (first + n) * LANES + lane, row = index * reciprocal >> 16;
            const u64 source = __shfl_sync(FULL_WARP, reinterpret_cast<u64>(from), row % LANES);
            in[n] = Piece();
            if (row < CHUNK && source != 0) in[n] = reinterpret_cast<const Piece *>(source)[index - row * pieces];
        }
#pragma unroll
        for (u32 n = 0; n < AT_ONCE; n++) {
            const u32 index = (first + n) * LANES + lane, row = index * reciprocal >> 16;
            if (row < CHUNK) rows[row * apart * pieces + index - row * pieces] = Wide::of(in[n]);
        }
    }
}

template <class Stored, class Wanted>
__device__ __forceinline__ void widen_rows(const Params &p) {
    const u32 num_heads = p.num_kv_heads.divisor;
    for_each_chunk(p, [&](const Key &key, u32 head, i64 first_row) {
#pragma unroll 1
        for (u32 of_values = 0; of_values < 2; of_values++) {
            const u32 pieces = of_values ? p.v_pieces : p.k_pieces;
            const typename Stored::Storage *from = key.row<Stored>(p, of_values ? p.v : p.k, head);
            u16 *to = static_cast<u16 *>(of_values ? p.v_rows : p.k_rows);
            widen_chunk<Stored, Wanted>(from, to + (first_row * num_heads + head) * pieces * 8, pieces, num_heads);
        }
    });
}

// Queries of the plan: heads of a token follow each other, as those of the next token do.
template <class Stored>
__device__ __forceinline__ void widen_queries(const Params &p) {
    const u32 num_heads = p.num_qo_heads.divisor;
    const u32 num_tokens = min(static_cast<u32>(p.plan.qo_indptr[p.plan.counts[FOLIO_COUNT_REQUESTS]]), p.num_tokens);
    const u32 num_rows = num_tokens * num_heads;
    const u32 lane = threadIdx.x % LANES, warp = blockIdx.x * WARPS + threadIdx.x / LANES;
#pragma unroll 1
    for (u32 first = warp * CHUNK; first < num_rows; first += gridDim.x * WARPS * CHUNK) {
        const u32 row = first + lane, token = divide(row, p.num_qo_heads), head = row - token * num_heads;
        const u8 *from = static_cast<const u8 *>(p.q.data) + token * p.q.stride_token + head * p.q.stride_head;
        u16 *const to = static_cast<u16 *>(p.q_rows) + static_cast<i64>(first) * p.k_pieces * 8;
        widen_chunk<Stored, f16>(row < num_rows ? from : nullptr, to, p.k_pieces, 1);
    }
}

template <class Stored>
__device__ __forceinline__ void widen_from(const Params &p) {
    if (p.row_dtype == FOLIO_F16) {
        widen_rows<Stored, f16>(p);
    } else {
        widen_rows<Stored, bf16>(p);
    }
}

}  // namespace folio

// Three CTAs are resident: within the registers of four, some would spill. Grid: any number of CTAs.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 3)
    folio_widen_rows(const __grid_constant__ FolioWidenParams p) {
    using namespace folio;
    allow_dependents();
    wait_for_prerequisites();
    if (p.cache_dtype == FOLIO_E4M3) {
        widen_from<e4m3>(p);
    } else {
        widen_from<e5m2>(p);
    }
}

// The same where the cache has the type of the rows, either of 16 bits. Grid: any number of CTAs.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_copy_rows(const __grid_constant__ FolioWidenParams p) {
    using namespace folio;
    allow_dependents();
    wait_for_prerequisites();
    widen_rows<f16, f16>(p);
}

// Grid: any number of CTAs.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_widen_queries(const __grid_constant__ FolioWidenParams p) {
    using namespace folio;
    allow_dependents();
    if (p.q_dtype == FOLIO_E4M3) {
        widen_queries<e4m3>(p);
    } else {
        widen_queries<e5m2>(p);
    }
    // Nothing of the launches before is read. But who depends on this one depends on those, too.
    wait_for_prerequisites();
}
