// Copies tokens of many requests from a paged cache in another form than rows of plain elements to dense rows, keys and
// values in one launch, and converts them. A warp takes a row, eight elements of a lane at a time: its keys and then its
// values. A row whose token or page does not exist is left as it is.
#include "core/gathered.cuh"
#include "core/stored.cuh"

namespace folio {

typedef FolioStoredGatherParams Params;

// Up to eight elements of a row that a lane moves.
template <class Wanted>
__device__ __forceinline__ void move(const Params &p, bool is_k, u32 index, i64 page, u32 token, i64 row) {
    const FolioGatheredTensor &to = is_k ? p.gather.k : p.gather.v;
    const FolioStoredTensor &t = is_k ? p.cache.k : p.cache.v;
    const u32 head = divide(index, to.head_pieces), d = VECTOR * (index - head * to.head_pieces.divisor);
    const u32 count = min(VECTOR, to.head_dim - d);
    float x[VECTOR];
    read_stored(x, StoredRow(t, p.cache.format.element, page, token, head), p.cache.format.form, head, d, count);
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) x[i] *= t.scale;
    Piece<Wanted>(x).store(row_of<Wanted>(to.rows, row, head) + d, count, p.gather.vectors);
}

template <class Wanted>
__device__ __forceinline__ void gather_as(const Params &p, i64 page, u32 token, i64 row) {
    const u32 heads = p.gather.num_kv_heads;
    const u32 k_pieces = heads * p.gather.k.head_pieces.divisor, v_pieces = heads * p.gather.v.head_pieces.divisor;
#pragma unroll 1
    for (u32 i = threadIdx.x % WARP; i < k_pieces + v_pieces; i += WARP) {
        const bool is_k = i < k_pieces;
        move<Wanted>(p, is_k, is_k ? i : i - k_pieces, page, token, row);
    }
}

__device__ __forceinline__ void gather_row(const Params &p, i64 row) {
    i64 page;
    u32 token;
    if (!find_token(p.gather, row, page, token)) return;
    switch (p.gather.row_dtype) {
        case FOLIO_F32: gather_as<f32>(p, page, token, row); break;
        case FOLIO_F16: gather_as<f16>(p, page, token, row); break;
        default: gather_as<bf16>(p, page, token, row); break;
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_gather_stored(const __grid_constant__ FolioStoredGatherParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const i64 row = static_cast<i64>(blockIdx.x) * (FOLIO_THREADS / WARP) + threadIdx.x / WARP;
    if (row < p.gather.num_rows) gather_row(p, row);
}
