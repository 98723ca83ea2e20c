// Copies latent records of many requests from a paged cache to dense rows, and converts them. A warp takes a row and
// finds its request in cu_seq_lens. Lengths and page ids are the device's, and unchecked: a row whose token or page does
// not exist is left as it is.
#include "core/gathered.cuh"
#include "core/records.cuh"

namespace folio {

typedef FolioMlaGatherParams Params;

// One part of a record, and where it goes.
struct Part {
    const void *from;
    void *to;
    const float *scales;  // one for each block, or null
    float scale;
    u32 dim;
};

// f(first element, elements) for every piece of a row that is this lane's.
template <class F>
__device__ __forceinline__ void each_piece(u32 dim, const F &f) {
#pragma unroll 1
    for (u32 d = VECTOR * (threadIdx.x % WARP); d < dim; d += VECTOR * WARP) f(d, min(VECTOR, dim - d));
}

template <class Stored, class Wanted>
__device__ __forceinline__ void copy_as(const Part &part, bool vectors) {
    each_piece(part.dim, [&](u32 d, u32 count) {
        Piece<Stored> in;
        Piece<Wanted> out;
        in.load(static_cast<const typename Stored::Storage *>(part.from) + d, count, vectors);
        typename Wanted::Storage *const to = static_cast<typename Wanted::Storage *>(part.to) + d;
        if constexpr (ARE_ONE<Stored, Wanted>) return in.store(to, count, vectors);
        const float scale = part.scales ? part.scales[d / SCALE_BLOCK] : part.scale;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) out.set(i, Stored::IS_FP8 ? in[i] * scale : in[i]);
        out.store(to, count, vectors);
    });
}

template <class Wanted>
__device__ __forceinline__ void gather_part(const Part &part, u32 dtype, bool vectors) {
    switch (dtype) {
        case FOLIO_F32: copy_as<f32, Wanted>(part, vectors); break;
        case FOLIO_F16: copy_as<f16, Wanted>(part, vectors); break;
        case FOLIO_BF16: copy_as<bf16, Wanted>(part, vectors); break;
        case FOLIO_E4M3: copy_as<e4m3, Wanted>(part, vectors); break;
        default: copy_as<e5m2, Wanted>(part, vectors); break;
    }
}

__device__ __forceinline__ u32 bytes_of(u32 dtype) { return dtype == FOLIO_F32 ? 4 : dtype <= FOLIO_BF16 ? 2 : 1; }

__device__ __forceinline__ const void *record_part(const FolioCache &part, u32 dtype, i64 page, u32 token) {
    return static_cast<const u8 *>(part.data) + (page * part.stride_page + token * part.stride_token) * bytes_of(dtype);
}

__device__ __forceinline__ void *row_of(const FolioRows &rows, u32 dtype, i64 row) {
    return static_cast<u8 *>(rows.data) + row * rows.stride_token * bytes_of(dtype);
}

__device__ __forceinline__ void gather_row(const Params &p, i64 row) {
    i64 page;
    u32 token;
    if (!find_token(p, row, page, token)) return;
    const FolioRecords &cache = p.cache;
    const float *scales = static_cast<const float *>(cache.scales.data);
    if (scales) scales = static_cast<const float *>(record_part(cache.scales, FOLIO_F32, page, token));
    // One copy of the conversions serves both parts.
#pragma unroll 1
    for (u32 i = 0; i < (p.rope_dim ? 2 : 1); i++) {
        const FolioCache &from = i == 0 ? cache.latent : cache.rope;
        const u32 dtype = i == 0 ? cache.latent_dtype : cache.rope_dtype;
        const Part part = {record_part(from, dtype, page, token), row_of(i == 0 ? p.dst : p.dst_rope, p.dst_dtype, row),
                           i == 0 ? scales : nullptr, p.k_scale, i == 0 ? p.rank : p.rope_dim};
        switch (p.dst_dtype) {
            case FOLIO_F32: gather_part<f32>(part, dtype, p.vectors); break;
            case FOLIO_F16: gather_part<f16>(part, dtype, p.vectors); break;
            default: gather_part<bf16>(part, dtype, p.vectors); break;
        }
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_mla_gather(const __grid_constant__ FolioMlaGatherParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const i64 row = static_cast<i64>(blockIdx.x) * (FOLIO_THREADS / WARP) + threadIdx.x / WARP;
    if (row < p.num_rows) gather_row(p, row);
}
