// Writes new tokens to a paged cache, keys and values in one launch; rounds to fp8 where the cache is fp8. It computes
// no scales. A CTA takes one token. Tokens with negative slots, or with slots past the cache, are skipped.
//
// Compiled per pair of types: FOLIO_Q of the tokens, FOLIO_KV of the cache (that, or fp8).
#include "core/append.cuh"

namespace folio {

// Keys and values are loaded together, and before anything waits for the slot.
template <u32 N>
__device__ __forceinline__ void append_token(const FolioAppendParams &p, i64 token) {
    const u32 k_pieces = p.num_kv_heads * p.k.pieces.divisor, v_pieces = p.num_kv_heads * p.v.pieces.divisor;
    AwaitedSlot number;
    number.ask(p, token);
    for (u32 i = threadIdx.x; i < max(k_pieces, v_pieces); i += FOLIO_THREADS) {
        const AppendPiece<N, FOLIO_Q, FOLIO_KV> k(p.k, i), v(p.v, i);
        Elements<N, FOLIO_Q> key, value;
        if (i < k_pieces) key = k.load(p.k, token);
        if (i < v_pieces) value = v.load(p.v, token);
        const i64 index = number.value(p);
        if (index < 0 || index >= p.num_slots) return;
        const CacheSlot slot = place(p, index);
        if (i < k_pieces) k.store(p.k, slot, key, CacheRounding<FOLIO_KV>(p.k, k.head));
        if (i < v_pieces) v.store(p.v, slot, value, CacheRounding<FOLIO_KV>(p.v, v.head));
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS) folio_append(const __grid_constant__ FolioAppendParams p) {
    folio::allow_dependents();  // what attends to the tokens prepares itself meanwhile
    folio::wait_for_prerequisites();
    if (p.vectors) {
        folio::append_token<folio::VECTOR>(p, blockIdx.x);
    } else {
        folio::append_token<1>(p, blockIdx.x);
    }
}
