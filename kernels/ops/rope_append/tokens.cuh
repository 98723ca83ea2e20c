// The tokens that a warp of rope_append.cu takes, and how what it needs of them comes to shared memory ahead. What is done
// with it is said in rows.cuh and values.cuh.
#pragma once
#include "core/append.cuh"

namespace folio {

typedef FOLIO_Q Source;
typedef FOLIO_KV Cached;

constexpr u32 WARP = 32, WARPS = FOLIO_THREADS / WARP;

// The tokens that a warp takes: every `stride`-th from `first` on, up to `end`.
struct Tokens {
    i64 first, stride, end;

    __device__ __forceinline__ i64 at(u32 n) const { return first + n * stride; }
};

// What each token has one of, an AwaitedSlot or an AwaitedPosition: 32 tokens at a time, of which a lane asks for one. The
// first ones are asked for before anything else. Calls of at() have n = 0, 1, 2 …
template <class Number>
class OfTokens {
public:
    // are_wanted: else nothing is read, and at() is not to be called.
    template <class P>
    __device__ __forceinline__ OfTokens(const P &p, const Tokens &tokens, bool are_wanted) {
        if (are_wanted) ask(p, tokens, 0);
    }

    template <class P>
    __device__ __forceinline__ i64 at(const P &p, const Tokens &tokens, u32 n) {
        if (n % WARP == 0 && n > 0) ask(p, tokens, n);
        return __shfl_sync(FULL_WARP, number.value(p), n % WARP);
    }

private:
    template <class P>
    __device__ __forceinline__ void ask(const P &p, const Tokens &tokens, u32 n) {
        const i64 token = tokens.at(n + threadIdx.x % WARP);
        if (token < tokens.end) number.ask(p, token);
    }

    Number number;
};

// Vectors of a lane, and bytes of a warp's cosines and of its sines, that are fetched for a token. Eight elements are a
// piece, of one vector or two.
constexpr u32 VECTORS = 4, OF_PIECE = VECTOR * sizeof(Source::Storage) / 16, ANGLE_BYTES = 512;

// What is on its way for a token. Vectors are the lane's own.
struct Stage {
    uint4 vectors[VECTORS][WARP];
    u8 angles[2][ANGLE_BYTES];

    __device__ __forceinline__ void fetch(u32 i, const void *source, bool is_there) {
        cp_async_or_zeros(shared_address(&vectors[i][threadIdx.x % WARP]), source, is_there);
    }
    __device__ __forceinline__ uint4 take(u32 i) const { return vectors[i][threadIdx.x % WARP]; }
};

// Three tokens on their way beside the one that is computed: with unwritten lines in the L2 a load takes 3 us.
constexpr u32 STAGES = 4;
typedef Stage Stages[STAGES];

// Rows: fetch(stage, n) asks for what the n-th token needs, take(stage, n) reads it then, and write(n) writes what comes of it.
template <class Rows>
__device__ __forceinline__ void move_in_turn(Rows &rows, const Tokens &tokens, Stages &stages) {
    // Asked for at one place: code comes from memory too.
#pragma unroll 1
    for (u32 fetched = 0;; fetched++) {
        if (tokens.at(fetched) < tokens.end) rows.fetch(stages[fetched % STAGES], fetched);
        cp_async_commit();
        if (fetched < STAGES - 1) continue;
        const u32 n = fetched - (STAGES - 1);
        if (tokens.at(n) >= tokens.end) return;
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // lanes read what others asked for
        rows.take(stages[n % STAGES], n);
        __syncwarp();  // all have read what is written next
        rows.write(n);
    }
}

}  // namespace folio
