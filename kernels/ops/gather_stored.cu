// Copies tokens of many requests from a paged cache in another form than rows of plain elements to dense rows, keys and
// values in one launch, and converts them. A warp takes 32 rows of the keys or of the values of one head: each lane finds one
// of them. A row whose token or page does not exist is left as it is.
#include "core/gathered.cuh"
#include "core/stored_rows.cuh"

namespace folio {

typedef FolioStoredGatherParams Params;

// The row of each lane.
__device__ __forceinline__ StoredPlace place_of(const FolioKvGatherParams &p, i64 row) {
    StoredPlace at = {0, 0, false};
    if (row >= p.num_rows) return at;
    const auto first_row = [&](i64 request) { return first_row_of(p, request); };
    const u32 request = request_of_own_row(first_row, p.batch_size, row);
    at.exists = find_token_of(p, request, row, at.page, at.token);
    return at;
}

// Where rows of keys, or of values, of one head go.
struct GatheredRows {
    const FolioGatheredTensor &to;
    u32 row_dtype, head;
    i64 first_row;
    float scale;
    bool vectors;

    __device__ __forceinline__ void vector(u32 row, u32 d, const float (&x)[VECTOR], bool exists) const {
        if (exists) store(row, d, VECTOR, x, true);
    }
    __device__ __forceinline__ void elements(u32 row, u32 d, u32 count, const float (&x)[VECTOR], bool exists) const {
        if (exists) store(row, d, count, x, vectors);
    }

private:
    __device__ __forceinline__ void store(u32 row, u32 d, u32 count, const float (&x)[VECTOR], bool at_once) const {
        float y[VECTOR];
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) y[i] = x[i] * scale;
        switch (row_dtype) {
            case FOLIO_F32: store_as<f32>(row, d, count, y, at_once); break;
            case FOLIO_F16: store_as<f16>(row, d, count, y, at_once); break;
            default: store_as<bf16>(row, d, count, y, at_once); break;
        }
    }

    template <class Wanted>
    __device__ __forceinline__ void store_as(u32 row, u32 d, u32 count, const float (&x)[VECTOR], bool at_once) const {
        Piece<Wanted>(x).store(row_of<Wanted>(to.rows, first_row + row, head) + d, count, at_once);
    }
};

}  // namespace folio

// Grid: for 32 rows as many blocks as have a warp for the keys and one for the values of every head.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_gather_stored(const __grid_constant__ FolioStoredGatherParams p) {
    using namespace folio;
    constexpr u32 WARPS = FOLIO_THREADS / WARP;
    wait_for_prerequisites();
    const u32 heads = p.gather.num_kv_heads, blocks = (2 * heads + WARPS - 1) / WARPS;
    const u32 chunk = blockIdx.x / blocks, unit = (blockIdx.x - chunk * blocks) * WARPS + threadIdx.x / WARP;
    if (unit >= 2 * heads) return;
    const bool is_k = unit < heads;
    const u32 head = is_k ? unit : unit - heads;
    const i64 first_row = static_cast<i64>(chunk) * STORED_ROWS;
    const FolioStoredTensor &from = is_k ? p.cache.k : p.cache.v;
    const GatheredRows to = {is_k ? p.gather.k : p.gather.v, p.gather.row_dtype, head, first_row, from.scale,
                             p.gather.vectors != 0};
    const StoredPlace at = place_of(p.gather, first_row + threadIdx.x % STORED_ROWS);
    bring_rows(from, p.cache.format, at, head, from.vectors && to.vectors, to);
}
