// Loads of records row by row for the Hopper MLA kernels, from pages of any size: a warpgroup of its own copies 16 bytes at
// a time, eight lanes for 128 bytes of a token. It has 32 registers, which decide how it is written.
#pragma once

#include "sm90/mla/tile.cuh"

namespace folio::mla {

constexpr u32 LOADING_THREADS = 128, LANES = 8;
// A lane has one of so many tokens. They are whole groups, so that its rows in a stage differ by a constant.
constexpr u32 TOKENS = LOADING_THREADS / LANES, TURNS = KEYS / TOKENS;
static_assert(TOKENS % GROUP == 0 && KEYS % TOKENS == 0);

// What the halves of the outputs do about loads.
struct RowStages {
    Shared &shared;

    // Copies are no work of the proxy that products read by. The loading warps would wait for all copies in a fence.
    static __device__ __forceinline__ void fence() { fence_proxy_async(); }

    template <int HALF>
    __device__ __forceinline__ void begin() {}

    template <int HALF>
    __device__ __forceinline__ void release(u32 stage, u32) {
        group_sync(2 + HALF, 128);
        if (thread_of_warpgroup() == 0) mbarrier_arrive(shared_address(&shared.released[stage]));
    }
};

class RowLoader {
public:
    __device__ __forceinline__ RowLoader(const FolioMlaHopperParams &p, Shared &shared)
        : p(p), shared(shared), items(p, shared.team) {}

    // Page ids are asked for a tile ahead: a tile whose copies wait for them takes 1.3 times as long. They are moved on before
    // the next ones are asked for, since a move waits for the number that it moves.
    __device__ __forceinline__ void run() {
        find();
        Turn turn;
        KeyTile next = look_up();
#pragma unroll 1
        while (next.first_key != NONE) {
            const KeyTile tile = next;
            next = look_up();
            mbarrier_wait(shared_address(&shared.released[turn.stage()]), turn.parity() ^ 1);
            copy(tile, shared_address(shared.stages[turn.stage()]));
            mbarrier_arrive_by_copies(shared_address(&shared.filled[turn.stage()]));
            ++turn.tiles;
        }
    }

private:
    static constexpr i32 NONE = -1;

    // A tile's first key, NONE behind the last tile, and the pages of the lane's tokens, NONE where there is no token.
    struct KeyTile {
        i32 first_key, pages[TURNS];
    };

    static __device__ __forceinline__ u32 lane() { return thread_of_warpgroup() % LANES; }
    static __device__ __forceinline__ u32 token() { return thread_of_warpgroup() / LANES; }

    // The keys of the first item from there on that has any.
    __device__ __forceinline__ void find() {
        const auto begin = [&](const RowTile &tile) { page_start = tile.page_start, key = tile.begin, end = tile.end; };
        if (!find_keys(p, shared.team, items, begin)) key = end = NONE;
    }

    // The tile whose turn it is, and moves on.
    __device__ __forceinline__ KeyTile look_up() {
        KeyTile tile;
        tile.first_key = key;
#pragma unroll
        for (u32 i = 0; i < TURNS; ++i) {
            const i32 at = key + static_cast<i32>(token() + TOKENS * i);
            tile.pages[i] = at < end ? p.mla.attention.plan.page_ids[page_start + divide(at, p.mla.page_size)] : NONE;
        }
        if (key == NONE) return tile;  // behind the last item there are no counts to read
        key += KEYS;
        if (key >= end) items.next(), find();
        return tile;
    }

    __device__ __forceinline__ void copy(const KeyTile &tile, u32 stage) {
        const u32 row = token() % GROUP;
        u32 to = stage + token() / GROUP * GROUP_BYTES + row * 128 + ((lane() ^ row) << 4);
#pragma unroll
        for (u32 i = 0; i < TURNS; ++i, to += TOKENS / GROUP * GROUP_BYTES) {
            const u32 at = static_cast<u32>(tile.first_key) + token() + TOKENS * i;
            const u32 in_page = at - divide(at, p.mla.page_size) * p.mla.page_size.divisor;
            // Tokens without a page, and those of pages that the cache does not have, are zeros.
            const bool exists = static_cast<u32>(tile.pages[i]) < p.mla.attention.num_pages;
            const u32 page = exists ? tile.pages[i] : 0;
            const u16 *const latent = row_of(p.mla.attention.k, page, in_page);
            const u16 *const rope = p.whole_records ? latent + RANK : row_of(p.mla.k_rope, page, in_page);
#pragma unroll
            for (int atom = 0; atom < LATENT_ATOMS; ++atom) {
                cp_async_or_zeros(to + atom * ATOM, latent + 64 * atom, exists);
            }
            cp_async_or_zeros(to + ROPE_OFFSET, rope, exists);
        }
    }

    // Where the lane's first piece of a token is.
    static __device__ __forceinline__ const u16 *row_of(const FolioCache &cache, u32 page, u32 token) {
        const u64 offset = page * static_cast<u64>(cache.stride_page) + token * static_cast<u64>(cache.stride_token);
        return static_cast<const u16 *>(cache.data) + 8 * lane() + offset;
    }

    const FolioMlaHopperParams &p;
    Shared &shared;
    Items items;
    i64 page_start;
    i32 key, end;  // of the tile whose turn it is to be looked up
};

}  // namespace folio::mla
