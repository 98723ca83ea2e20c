// Writes new tokens to a paged cache, keys and values in one launch; rounds to fp8 where the cache is. A
// CTA takes one token. Negative slots, and slots past the cache, are skipped.
//
// Compiled per pair of types: FOLIO_Q of the tokens, FOLIO_KV of the cache (that, or fp8).
#include "common/paged.cuh"
#include "common/softmax.cuh"

namespace folio {

typedef FOLIO_Q Source;
typedef FOLIO_KV Cached;

// N elements moved by one thread; rows are 16-byte aligned where N is 8.
template <int N, class T>
union Elements {
    typename T::Storage x[N];
    uint4 vectors[(N * sizeof(typename T::Storage) + 15) / 16];
    uint2 half;

    __device__ __forceinline__ void load(const typename T::Storage *source) {
        if constexpr (N == 1) {
            x[0] = *source;
        } else {
#pragma unroll
            for (u32 i = 0; i < sizeof(vectors) / 16; i++) vectors[i] = reinterpret_cast<const uint4 *>(source)[i];
        }
    }

    __device__ __forceinline__ void store(typename T::Storage *target) const {
        if constexpr (N == 1) {
            *target = x[0];
        } else if constexpr (N * sizeof(typename T::Storage) == 8) {
            *reinterpret_cast<uint2 *>(target) = half;
        } else {
#pragma unroll
            for (u32 i = 0; i < sizeof(vectors) / 16; i++) reinterpret_cast<uint4 *>(target)[i] = vectors[i];
        }
    }
};

template <int N>
__device__ __forceinline__ void append_piece(const FolioAppendTensor &t, i64 token, const Slot &slot, u32 piece) {
    const u32 head = divide(piece, t.pieces), d = N * (piece - head * t.pieces.divisor);
    Elements<N, Source> in;
    in.load(static_cast<const Source::Storage *>(t.source.data) + token * t.source.stride_token +
            head * t.source.stride_head + d);
    Elements<N, Cached> out;
    if constexpr (sizeof(Cached::Storage) == 1) {
        const float divisor = t.scale * head_scale(t.scales, t.scales_stride, head);
#pragma unroll
        for (int i = 0; i < N; i++) out.x[i] = Cached::store(Source::load(in.x[i]) / divisor);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) out.x[i] = in.x[i];
    }
    out.store(static_cast<Cached::Storage *>(t.cache.data) + slot.offset(t.cache) + head * t.cache.stride_head + d);
}

template <int N>
__device__ __forceinline__ void append_token(const FolioAppendParams &p, i64 token, const Slot &slot) {
    const u32 k_pieces = p.num_kv_heads * p.k.pieces.divisor, pieces = k_pieces + p.num_kv_heads * p.v.pieces.divisor;
#pragma unroll 2
    for (u32 piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
        if (piece < k_pieces) {
            append_piece<N>(p.k, token, slot, piece);
        } else {
            append_piece<N>(p.v, token, slot, piece - k_pieces);
        }
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(256) folio_append(const __grid_constant__ FolioAppendParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const i64 token = blockIdx.x;
    const i64 index = p.slot_bytes == 4 ? static_cast<const i32 *>(p.slots)[token] : static_cast<const i64 *>(p.slots)[token];
    if (index < 0 || index >= p.num_slots) return;
    const Slot slot = {index / p.page_size, static_cast<u32>(index % p.page_size)};
    if (p.vectors) {
        append_token<8>(p, token, slot);
    } else {
        append_token<1>(p, token, slot);
    }
}
