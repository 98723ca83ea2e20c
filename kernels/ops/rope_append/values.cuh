// Values on their way to the cache, in pieces of eight elements that are asked for ahead, or element by element.
#pragma once
#include "core/append.cuh"
#include "ops/rope_append/tokens.cuh"

namespace folio {

// Pieces of a token's values that a lane has.
constexpr u32 PIECES = VECTORS / OF_PIECE;

typedef AppendPiece<VECTOR, Source, Cached> ValuePiece;

// A warp's values, in pieces that lie one after another.
class Values {
public:
    __device__ __forceinline__ Values(const FolioAppendParams &p, u32 unit, const Tokens &tokens)
        : p(p), tokens(tokens), slots(p, tokens, true), first(unit * PIECES * WARP + threadIdx.x % WARP) {}

    __device__ __forceinline__ void fetch(Stage &stage, u32 n) const {
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            const auto *const from = reinterpret_cast<const uint4 *>(piece(i).source(p.v, tokens.at(n)));
#pragma unroll
            for (u32 j = 0; j < OF_PIECE; j++) stage.fetch(i * OF_PIECE + j, from + j, exists(i));
        }
    }

    __device__ __forceinline__ void take(const Stage &stage, u32) {
#pragma unroll
        for (u32 i = 0; i < VECTORS; i++) taken[i / OF_PIECE].vectors[i % OF_PIECE] = stage.take(i);
    }

    __device__ __forceinline__ void write(u32 n) {
        const i64 slot = slots.at(p, tokens, n);
        if (slot < 0 || slot >= p.num_slots) return;
        const CacheSlot at = place(p, slot);
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            const ValuePiece piece = this->piece(i);
            if (exists(i)) piece.store(p.v, at, taken[i], CacheRounding<Cached>(p.v, piece.head));
        }
    }

private:
    __device__ __forceinline__ u32 all() const { return p.num_kv_heads * p.v.pieces.divisor; }
    __device__ __forceinline__ bool exists(u32 i) const { return first + i * WARP < all(); }
    __device__ __forceinline__ ValuePiece piece(u32 i) const {
        return ValuePiece(p.v, min(first + i * WARP, all() - 1));
    }

    const FolioAppendParams &p;
    const Tokens &tokens;
    OfTokens<AwaitedSlot> slots;
    const u32 first;
    Elements<VECTOR, Source> taken[PIECES];  // of one token
};

// Values that do not move in vectors, element by element.
__device__ __forceinline__ void move_loose_values(const FolioAppendParams &p, u32 unit, const Tokens &tokens) {
    const u32 end = min((unit + 1) * PIECES * WARP, p.num_kv_heads * p.v.pieces.divisor);
#pragma unroll 1
    for (i64 token = tokens.first; token < tokens.end; token += tokens.stride) {
        const i64 slot = slot_index(p, token);
        if (slot < 0 || slot >= p.num_slots) continue;
        const CacheSlot at = place(p, slot);
#pragma unroll 1
        for (u32 i = unit * PIECES * WARP + threadIdx.x % WARP; i < end; i += WARP) {
            const AppendPiece<1, Source, Cached> piece(p.v, i);
            piece.store(p.v, at, piece.load(p.v, token), CacheRounding<Cached>(p.v, piece.head));
        }
    }
}

}  // namespace folio
