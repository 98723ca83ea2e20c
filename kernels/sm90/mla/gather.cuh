// Loads of records for the Hopper MLA kernel where tensor maps do not describe the cache: pages of fewer than 8 tokens. The
// warpgroups of the outputs copy every record by cp.async, 16 bytes at a time, to where a box would have put them. Three
// warps of each have half of a tile's tokens: four lanes a token. A copy is complete one tile later, when the warp that
// made it says so. Page ids are read when they are needed: the warps that wait for them have the time, and no registers.
#pragma once

#include "sm90/mla/tile.cuh"

namespace folio::mla {

constexpr int LANES_OF_TOKEN = 4, COPYING_WARPS = KEYS / 2 * LANES_OF_TOKEN / 32;
constexpr int LATENT_COPIES = RANK * 2 / 16 / LANES_OF_TOKEN, ROPE_COPIES = ROPE * 2 / 16 / LANES_OF_TOKEN;
static_assert(COPYING_WARPS == 3, "half of the tokens are whole warps");

class Gather {
public:
    // Arrivals that fill a stage.
    static constexpr u32 ARRIVALS = 2 * COPYING_WARPS;

    __device__ __forceinline__ Gather(const FolioMlaHopperParams &p, Shared &shared) : p(p), shared(shared) {}

    // The first stages. The last of them is handed on by the first release.
    template <int HALF>
    __device__ __forceinline__ void begin() {
        if (is_leader()) {
            find_keys(Items(p));
            shared.keys[0] = shared.begin;
        }
        both_halves();
        u32 filled = 0;
#pragma unroll 1
        for (; filled < STAGES && issue(filled); ++filled) both_halves();
        cp_async_commit();
        cp_async_wait<0>();
#pragma unroll 1
        for (u32 stage = 0; stage < filled && stage + 1 < STAGES; ++stage) arrive(stage);
    }

    // Both halves have read the stage: requests the next tile into it, and hands on the tile that was requested before.
    template <int HALF>
    __device__ __forceinline__ void release(u32 stage, u32) {
        both_halves();
        issue(stage);
        cp_async_commit();
        cp_async_wait<1>();
        // Arrivals beyond the last tile complete phases that nobody waits for.
        arrive((stage + STAGES - 1) % STAGES);
    }

private:
    // The leader's warp may have come apart.
    static __device__ __forceinline__ void both_halves() {
        __syncwarp();
        barrier_sync(2, 256);
    }
    static __device__ __forceinline__ bool is_leader() { return thread_of_block() == 128; }

    // Uniform for a warp, and known to be so.
    static __device__ __forceinline__ bool is_copying() {
        return __shfl_sync(FULL_WARP, thread_of_warpgroup() / 32, 0) < COPYING_WARPS;
    }

    // A copying thread's token of a tile.
    static __device__ __forceinline__ u32 token_of(u32 thread) {
        return (thread >> 8) * (KEYS / 2) + (thread & 127) / LANES_OF_TOKEN;
    }

    // Whether there was another tile. The threads agree on its first key through shared memory. It is written where the
    // tile before last had its own, so that threads that are late still find theirs.
    __device__ __forceinline__ bool issue(u32 stage) {
        i32 key = shared.keys[stage & 1];
        if (key >= shared.end) {
            both_halves();
            if (is_leader() && shared.end > 0) {
                Items items(p, shared.round);
                items.next();
                find_keys(items);
            }
            both_halves();
            if (shared.end == 0) return false;
            key = shared.begin;
        }
        copy(stage, key);
        if (is_leader()) shared.keys[(stage & 1) ^ 1] = key + KEYS;
        return true;
    }

    // Tokens without a page read as zeros.
    __device__ __forceinline__ void copy(u32 stage, i32 first_key) {
        const u32 thread = thread_of_block(), token = token_of(thread), lane = thread % LANES_OF_TOKEN;
        if (!is_copying()) return;
        const u32 at = static_cast<u32>(first_key) + token,
                  in_page = at - divide(at, p.mla.page_size) * p.mla.page_size.divisor;
        const i32 page = page_of(static_cast<i32>(at));
        const u32 bytes = page >= 0 ? 16 : 0;
        const i64 row = page >= 0 ? page : 0;
        const FolioCache &latent = p.mla.attention.k, &rope = p.mla.k_rope;
        const u16 *const k =
            static_cast<const u16 *>(latent.data) + row * latent.stride_page + in_page * latent.stride_token + 8 * lane;
        const u16 *const k_rope =
            static_cast<const u16 *>(rope.data) + row * rope.stride_page + in_page * rope.stride_token + 8 * lane;
        const u32 to = shared_address(shared.stages[stage]) + token / GROUP * GROUP_BYTES + token % GROUP * 128;
        // Swizzled: chunk c of row r of an atom lies at c ^ r. A lane has chunks `lane` and `lane + 4` of every atom.
        const u32 even = to + ((lane ^ token % GROUP) << 4), odd = to + (((lane + 4) ^ token % GROUP) << 4);
#pragma unroll
        for (int i = 0; i < LATENT_COPIES; i += 2) {
            cp_async<16>(even + i / 2 * ATOM, k + 8 * LANES_OF_TOKEN * i, bytes);
            cp_async<16>(odd + i / 2 * ATOM, k + 8 * LANES_OF_TOKEN * (i + 1), bytes);
        }
        static_assert(ROPE_COPIES == 2, "one atom");
        cp_async<16>(even + ROPE_OFFSET, k_rope, bytes);
        cp_async<16>(odd + ROPE_OFFSET, k_rope + 8 * LANES_OF_TOKEN, bytes);
    }

    // The warp's copies to the stage have landed.
    __device__ __forceinline__ void arrive(u32 stage) {
        if (!is_copying()) return;
        fence_proxy_async();
        __syncwarp();
        if (thread_of_block() % 32 == 0) mbarrier_arrive(shared_address(&shared.filled[stage]));
    }

    // The leader's: the first item from there on in which the CTA's rows see keys.
    __device__ __forceinline__ void find_keys(Items items) {
        for (; items.any(); items.next()) {
            if (!items.holds()) continue;
            const RowTile tile(p, items.index());
            if (tile.num_rows == 0 || tile.num_keys() == 0) continue;
            shared.page_start = tile.page_start, shared.round = items.current();
            shared.begin = tile.begin, shared.end = tile.end;
            return;
        }
        shared.begin = shared.end = 0;
    }

    // The page of the token at `key`; none for what lies past the end, and for ids that the cache does not have.
    __device__ __forceinline__ i32 page_of(i32 key) const {
        if (key >= shared.end) return -1;
        const FolioAttentionParams &a = p.mla.attention;
        const i32 id = a.plan.page_ids[shared.page_start + divide(key, p.mla.page_size)];
        return static_cast<u32>(id) < a.num_pages ? id : -1;
    }

    const FolioMlaHopperParams &p;
    Shared &shared;
};

}  // namespace folio::mla
