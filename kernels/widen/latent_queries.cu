// Queries of MLA in fp8 to rows of 16 bits, latent and rotary part behind each other, which kernels for MLA then read. Both
// 16-bit types have all numbers of fp8. No products.
#include "core/elements.cuh"
#include "core/integers.cuh"
#include "params/latent_queries.h"

namespace folio {

typedef FolioLatentQueriesParams Params;

// Eight elements of a row, which begin anywhere.
template <class Stored, class Wanted>
__device__ __forceinline__ void widen_piece(const u8 *from, bool is_aligned, uint4 *to) {
    Piece<Stored> in;
    in.load(from, VECTOR, is_aligned);
    u32 pairs[VECTOR / 2];
#pragma unroll
    for (u32 i = 0; i < VECTOR / 2; i++) pairs[i] = Wanted::pack(in[2 * i], in[2 * i + 1]);
    *to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// A warp takes a row of a token and a head at a time.
template <class Stored, class Wanted>
__device__ __forceinline__ void widen_rows(const Params &p) {
    const u32 num_tokens = min(static_cast<u32>(p.qo_indptr[p.counts[FOLIO_COUNT_REQUESTS]]), p.num_tokens);
    const u32 num_rows = num_tokens * p.num_heads.divisor, all = p.pieces + p.rope_pieces;
    uint4 *const rows = reinterpret_cast<uint4 *>(p.rows);
#pragma unroll 1
    for (u32 row = blockIdx.x * WARPS + threadIdx.x / LANES; row < num_rows; row += gridDim.x * WARPS) {
        const u32 token = divide(row, p.num_heads), head = row - token * p.num_heads.divisor;
        const u8 *const latent = row_of<Stored>(p.q, token, head), *const rope = row_of<Stored>(p.q_rope, token, head);
        for (u32 piece = threadIdx.x % LANES; piece < all; piece += LANES) {
            const u8 *from = piece < p.pieces ? latent + VECTOR * piece : rope + VECTOR * (piece - p.pieces);
            widen_piece<Stored, Wanted>(from, p.is_aligned != 0, rows + static_cast<u64>(row) * all + piece);
        }
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

// Grid: any number of CTAs.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_latent_queries(const __grid_constant__ FolioLatentQueriesParams p) {
    using namespace folio;
    // The kernel that reads the rows waits for this one's end.
    allow_dependents();
    if (p.q_dtype == FOLIO_E4M3) {
        widen_from<e4m3>(p);
    } else {
        widen_from<e5m2>(p);
    }
}
