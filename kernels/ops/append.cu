// Writes new tokens to a paged cache, keys and values in one launch; rounds to fp8 where the cache is fp8. It computes
// no scales. A CTA takes one token. Tokens with negative slots, or with slots past the cache, are skipped.
//
// Compiled per pair of types: FOLIO_Q of the tokens, FOLIO_KV of the cache (that, or fp8).
#include "core/elements.cuh"
#include "core/paged.cuh"
#include "core/softmax.cuh"

namespace folio {

typedef FOLIO_Q Source;
typedef FOLIO_KV Cached;
typedef CacheRows<Cached> Cache;
static_assert(Cache::SCALES == ScaleGranularity::HEAD, "the caller gives the scales; nothing computes them from rows");

// Where a token goes. A cache may have more pages than int32 can count.
struct CacheSlot {
    i64 page;
    u32 token;
};

// The place of a piece of N elements within a row of heads.
template <u32 N>
struct Piece {
    u32 head, d;

    __device__ __forceinline__ Piece(const FolioAppendTensor &t, u32 index) {
        head = divide(index, t.pieces);
        d = N * (index - head * t.pieces.divisor);
    }

    __device__ __forceinline__ Elements<N, Source> load(const FolioAppendTensor &t, i64 token) const {
        Elements<N, Source> in;
        in.load(static_cast<const Source::Storage *>(t.source.data) + token * t.source.stride_token +
                head * t.source.stride_head + d);
        return in;
    }

    __device__ __forceinline__ void store(const FolioAppendTensor &t, const CacheSlot &slot,
                                          const Elements<N, Source> &in) const {
        Elements<N, Cached> out;
        if constexpr (Cached::IS_FP8) {
            const float divisor = t.scale * head_scale(t.scales, t.scales_stride, head);
#pragma unroll
            for (u32 i = 0; i < N; i++) out.x[i] = Cached::store(Source::load(in.x[i]) / divisor);
        } else {
#pragma unroll
            for (u32 i = 0; i < N; i++) out.x[i] = in.x[i];
        }
        out.store(Cache::row(t.cache, slot.page, slot.token, head) + d);
    }
};

__device__ __forceinline__ i64 slot_index(const FolioAppendParams &p, i64 token) {
    return p.slot_bytes == 4 ? static_cast<const i32 *>(p.slots)[token] : static_cast<const i64 *>(p.slots)[token];
}

__device__ __forceinline__ CacheSlot place(const FolioAppendParams &p, i64 index) {
    if (index < 1ll << 31) {
        const u32 page = divide(static_cast<u32>(index), p.page_size);
        return {page, static_cast<u32>(index) - page * p.page_size.divisor};
    }
    return {index / p.page_size.divisor, static_cast<u32>(index % p.page_size.divisor)};
}

// Keys and values are loaded together, and before anything waits for the slot.
template <u32 N>
__device__ __forceinline__ void append_token(const FolioAppendParams &p, i64 token) {
    const u32 k_pieces = p.num_kv_heads * p.k.pieces.divisor, v_pieces = p.num_kv_heads * p.v.pieces.divisor;
    const i64 index = slot_index(p, token);
    for (u32 i = threadIdx.x; i < max(k_pieces, v_pieces); i += FOLIO_THREADS) {
        const Piece<N> k(p.k, i), v(p.v, i);
        Elements<N, Source> key, value;
        if (i < k_pieces) key = k.load(p.k, token);
        if (i < v_pieces) value = v.load(p.v, token);
        if (index < 0 || index >= p.num_slots) return;
        const CacheSlot slot = place(p, index);
        if (i < k_pieces) k.store(p.k, slot, key);
        if (i < v_pieces) v.store(p.v, slot, value);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS) folio_append(const __grid_constant__ FolioAppendParams p) {
    folio::wait_for_prerequisites();
    if (p.vectors) {
        folio::append_token<folio::VECTOR>(p, blockIdx.x);
    } else {
        folio::append_token<1>(p, blockIdx.x);
    }
}
