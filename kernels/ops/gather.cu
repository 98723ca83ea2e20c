// Copies tokens of many requests from a paged cache to dense rows, keys and values in one launch, and converts them. A warp
// takes a row: the pieces of its keys and then those of its values, eight elements each. A row whose token or page does
// not exist is left as it is.
#include "core/gathered.cuh"
#include "core/logits.cuh"
#include "core/records.cuh"
#include "params/gather.h"

namespace folio {

typedef FolioKvGatherParams Params;

// Pieces that a lane has on their way at once: up to 64 bytes.
template <class Stored>
constexpr u32 PIECES_OF_LANE = sizeof(typename Stored::Storage) == 4 ? 2 : 4;

// Loads are plain: those that are evicted first copy 3 % less in a second.
template <class Stored>
__device__ __forceinline__ Piece<Stored> loaded(const typename Stored::Storage *from, u32 count, bool vectors) {
    typedef Elements<VECTOR, Stored> Vector;
    Piece<Stored> in;
    if constexpr (sizeof(Vector) >= 16) {
        if (vectors) {
            in.elements = *reinterpret_cast<const Vector *>(from);
            return in;
        }
    }
    in.load(from, count, vectors);
    return in;
}

// Up to eight elements of a head: where they are in the cache, and where they go.
template <class Stored, class Wanted>
struct Move {
    const typename Stored::Storage *from;
    typename Wanted::Storage *to;
    u32 count;
    float scale;

    __device__ __forceinline__ Move(const FolioGatheredTensor &t, u32 index, i64 page, u32 token, i64 row) {
        const u32 head = divide(index, t.head_pieces), d = VECTOR * (index - head * t.head_pieces.divisor);
        from = CacheRows<Stored>::row(t.cache, page, token, head) + d;
        to = static_cast<typename Wanted::Storage *>(t.rows.data) + row * t.rows.stride_token +
             head * t.rows.stride_head + d;
        count = min(VECTOR, t.head_dim - d);
        if constexpr (Stored::IS_FP8) scale = t.scale * head_scale(t.scales, t.scales_stride, head);
    }

    __device__ __forceinline__ void store(const Piece<Stored> &in, bool vectors) const {
        if constexpr (ARE_ONE<Stored, Wanted>) {
            in.store(to, count, vectors);
        } else {
            Piece<Wanted> out;
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) out.set(i, Stored::IS_FP8 ? in[i] * scale : in[i]);
            out.store(to, count, vectors);
        }
    }
};

template <class Stored, class Wanted>
__device__ __forceinline__ void gather_as(const Params &p, i64 page, u32 token, i64 row) {
    const u32 k_pieces = p.num_kv_heads * p.k.head_pieces.divisor, v_pieces = p.num_kv_heads * p.v.head_pieces.divisor;
    const u32 lane = threadIdx.x % WARP;
    const auto move = [&](u32 i) {
        const bool is_k = i < k_pieces;
        return Move<Stored, Wanted>(is_k ? p.k : p.v, is_k ? i : i - k_pieces, page, token, row);
    };
#pragma unroll 1
    for (u32 first = lane; first < k_pieces + v_pieces; first += PIECES_OF_LANE<Stored> * WARP) {
        Piece<Stored> in[PIECES_OF_LANE<Stored>];
#pragma unroll
        for (u32 n = 0; n < PIECES_OF_LANE<Stored>; n++) {
            const u32 i = first + n * WARP;
            if (i >= k_pieces + v_pieces) continue;
            const auto piece = move(i);
            in[n] = loaded<Stored>(piece.from, piece.count, p.vectors);
        }
#pragma unroll
        for (u32 n = 0; n < PIECES_OF_LANE<Stored>; n++) {
            const u32 i = first + n * WARP;
            if (i < k_pieces + v_pieces) move(i).store(in[n], p.vectors);
        }
    }
}

template <class Stored>
__device__ __forceinline__ void gather_from(const Params &p, i64 page, u32 token, i64 row) {
    switch (p.row_dtype) {
        case FOLIO_F32: gather_as<Stored, f32>(p, page, token, row); break;
        case FOLIO_F16: gather_as<Stored, f16>(p, page, token, row); break;
        default: gather_as<Stored, bf16>(p, page, token, row); break;
    }
}

__device__ __forceinline__ void gather_row(const Params &p, i64 row) {
    i64 page;
    u32 token;
    if (!find_token(p, row, page, token)) return;
    switch (p.cache_dtype) {
        case FOLIO_F32: gather_from<f32>(p, page, token, row); break;
        case FOLIO_F16: gather_from<f16>(p, page, token, row); break;
        case FOLIO_BF16: gather_from<bf16>(p, page, token, row); break;
        case FOLIO_E4M3: gather_from<e4m3>(p, page, token, row); break;
        default: gather_from<e5m2>(p, page, token, row); break;
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_kv_gather(const __grid_constant__ FolioKvGatherParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const i64 row = static_cast<i64>(blockIdx.x) * (FOLIO_THREADS / WARP) + threadIdx.x / WARP;
    if (row < p.num_rows) gather_row(p, row);
}
