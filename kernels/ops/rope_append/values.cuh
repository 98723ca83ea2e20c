// Values on their way to the cache, in pieces of eight elements that are asked for ahead, or element by element.
#pragma once
#include "core/append.cuh"
#include "ops/rope_append/packed.cuh"
#include "ops/rope_append/tokens.cuh"

namespace folio {

// Pieces of a token's values that a lane has.
constexpr u32 PIECES = VECTORS / OF_PIECE;

typedef AppendPiece<VECTOR, Source, Cached> ValuePiece;

// A warp's values, in pieces that lie one after another.
class Values {
public:
    __device__ __forceinline__ Values(const FolioAppendParams &p, u32 unit, const Tokens &tokens)
        : p(p),
          tokens(tokens),
          slots(p, tokens, true),
          left(static_cast<i32>(all() - unit * PIECES * WARP - threadIdx.x % WARP)),
          to_next_token(tokens.stride * p.v.source.stride_token) {
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            const ValuePiece piece(p.v, exists(i) ? all() - left + i * WARP : 0);
            from[i] = piece.source(p.v, tokens.first);
            to[i] = piece.head * p.v.cache.stride_head + piece.d;
            roundings[i].made = CacheRounding<Cached>(p.v, piece.head);
        }
    }

    __device__ __forceinline__ void fetch(const LaneStage &stage, u32) {
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
#pragma unroll
            for (u32 j = 0; j < OF_PIECE; j++) {
                stage.fetch(i * OF_PIECE + j, reinterpret_cast<const uint4 *>(from[i]) + j, exists(i));
            }
            from[i] += to_next_token;
        }
    }

    __device__ __forceinline__ void take(const LaneStage &stage, u32) {
#pragma unroll
        for (u32 i = 0; i < VECTORS; i++) taken[i / OF_PIECE].vectors[i % OF_PIECE] = stage.take(i);
    }

    __device__ __forceinline__ void write(u32 n) {
        const i64 place = slots.at(p, tokens, n, [&](i64 slot) { return place_in_cache(p, p.v.cache, slot); });
        if (place == NOWHERE) return;
        Cached::Storage *const token = static_cast<Cached::Storage *>(p.v.cache.data) + place;
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            if (exists(i)) store(taken[i], roundings[i].made, token + to[i]);
        }
    }

private:
    __device__ __forceinline__ u32 all() const { return p.num_kv_heads * p.v.pieces.divisor; }
    __device__ __forceinline__ bool exists(u32 i) const { return left > static_cast<i32>(i * WARP); }

    template <class T>
    static __device__ __forceinline__ void store(const Elements<VECTOR, Source> &piece,
                                                 const CacheRounding<T> &rounding, typename T::Storage *to) {
        if constexpr (T::IS_FP8) {
            float x[VECTOR];
            Packed<Source>(piece).unpack(x);
            rounding.vector(x).store(to);
        } else {
            piece.store(to);
        }
    }

    const FolioAppendParams &p;
    const Tokens &tokens;
    OfTokens<AwaitedSlot> slots;
    const i32 left;  // pieces from the lane's first one to the end of the token
    const i64 to_next_token;
    const Source::Storage *from[PIECES];
    i64 to[PIECES];  // from where the cache has the token
    LaterRounding roundings[PIECES];
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
