// The tokens that a warp of rope_append.cu takes, and how what it needs of them comes to shared memory ahead. What is done
// with it is said in rows.cuh and values.cuh.
#pragma once
#include "core/append.cuh"
#include "ptx/shared.cuh"

namespace folio {

typedef FOLIO_Q Source;
typedef FOLIO_KV Cached;
typedef CacheRows<Cached> Cache;

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

    // What `make` makes of the number of token n. Lanes make it of 32 tokens at once.
    template <class P, class Make>
    __device__ __forceinline__ i64 at(const P &p, const Tokens &tokens, u32 n, const Make &make) {
        if (n % WARP == 0) {
            if (n > 0) ask(p, tokens, n);
            of_lane.made = make(of_lane.asked.value(p));
        }
        return __shfl_sync(FULL_WARP, of_lane.made, n % WARP);
    }

private:
    template <class P>
    __device__ __forceinline__ void ask(const P &p, const Tokens &tokens, u32 n) {
        const i64 token = tokens.at(n + threadIdx.x % WARP);
        if (token < tokens.end) of_lane.asked.ask(p, token);
    }

    // One after the other, in the same registers.
    union OfLane {
        Number asked;
        i64 made;

        __device__ __forceinline__ OfLane() {}
    } of_lane;
};

constexpr i64 NOWHERE = 1ll << 63;

// Where a cache has the first row of a token, in elements.
__device__ __forceinline__ i64 place_in_cache(const FolioAppendParams &p, const FolioCache &cache, i64 slot) {
    if (slot < 0 || slot >= p.num_slots) return NOWHERE;
    const CacheSlot at = place(p, slot);
    return Cache::offset(cache, at.page, at.token);
}

// A rounding that is made after it is declared, as those in arrays are.
union LaterRounding {
    CacheRounding<Cached> made;

    __device__ __forceinline__ LaterRounding() {}
};

// Vectors of a lane, and bytes of a warp's cosines and of its sines, that are fetched for a token. Eight elements are a
// piece, of one vector or two.
constexpr u32 VECTORS = 4, OF_PIECE = VECTOR * sizeof(Source::Storage) / 16, ANGLE_BYTES = 16 * WARP;

// What is on its way for a token: vectors that are the lane's own, then cosines and sines, which all lanes read.
typedef uint4 OfWarp[WARP];
typedef OfWarp Stage[VECTORS + 2];

// A stage as a lane sees it, by address: to find the shared memory of a CTA anew for every vector takes a wait of its own.
class LaneStage {
public:
    __device__ __forceinline__ explicit LaneStage(u32 address) : address(address) {}

    __device__ __forceinline__ void fetch(u32 i, const void *source, bool is_there) const {
        cp_async_or_zeros(address + i * sizeof(OfWarp), source, is_there);
    }
    __device__ __forceinline__ uint4 take(u32 i) const { return ld_shared_v4(address + i * sizeof(OfWarp)); }

    // The lane's vector of the cosines (0) or sines (1).
    __device__ __forceinline__ void fetch_angles(u32 plane, const void *source) const {
        cp_async<16>(address + (VECTORS + plane) * sizeof(OfWarp), source, 16);
    }
    // The cosines or sines from `byte` on.
    __device__ __forceinline__ uint4 angles(u32 plane, u32 byte) const {
        return ld_shared_v4(address - 16 * (threadIdx.x % WARP) + byte + (VECTORS + plane) * sizeof(OfWarp));
    }

private:
    u32 address;
};

// Three tokens on their way beside the one that is computed: with unwritten lines in the L2 a load takes 3 us.
constexpr u32 STAGES = 4;
typedef Stage Stages[STAGES];

// Rows: fetch(stage, n) asks for what the n-th token needs, take(stage, n) reads it then, and write(n) writes what comes of it.
template <class Rows>
__device__ __forceinline__ void move_in_turn(Rows &rows, const Tokens &tokens, Stages &stages) {
    const u32 first = kept(shared_address(&stages[0][0][threadIdx.x % WARP]));
    i64 left = tokens.end - tokens.first;  // from the token that is asked for
    // Asked for at one place: code comes from memory too.
#pragma unroll 1
    for (u32 fetched = 0;; fetched++, left -= tokens.stride) {
        if (left > 0) rows.fetch(LaneStage(first + fetched % STAGES * sizeof(Stage)), fetched);
        cp_async_commit();
        if (fetched < STAGES - 1) continue;
        const u32 n = fetched - (STAGES - 1);
        if (left + (STAGES - 1) * tokens.stride <= 0) return;
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // lanes read what others asked for
        rows.take(LaneStage(first + n % STAGES * sizeof(Stage)), n);
        __syncwarp();  // all have read what is written next
        rows.write(n);
    }
}

}  // namespace folio
