// Absorbed MLA decode for Hopper where a request has few rows (heads x query tokens): 576-element latent records in pages,
// rows in tiles of 16. Bound by memory: a record is read once per row tile, and the arithmetic hides behind it.
//
// Grid: as many CTAs as multiprocessors. A CTA takes units (a row tile of a work item) in rounds. Two consumer
// warpgroups take a unit's tiles of 64 tokens in turn; the warps behind them load, across units.
// Both products have records as the wide operand of wgmma and the 16 rows as the narrow one (products.cuh).
//
// Clocks of a multiprocessor for 64 tokens, at 18.3 bytes per clock (4.1 TB/s over 132 at 1.7 GHz):
//
//                   loads   shared memory at 128 B/clk             tensor unit   conversions
//   16 bits         4030    72 K in, 90 K scores, 80 K outputs:    68 * 8: 544   -
//                           1936
//   fp8             2014    36 K in, 54 K scores, 48 K outputs:    544           336 per quarter, two clocks each: 672
//                           1104
//
// One warpgroup in sequence takes 2950 clocks for 16 bits (measured), and less than the loads; but late CTAs, which have the
// memory to themselves, then wait for products. Two, a tile each at a time, need 2000 clocks for a tile of fp8 (measured).
// In flight while a tile is computed: 7 of 11 slots, 129 KB (16 bits), 6 of 10 or 5 of 9 slots, 114 or 105 KB (fp8).
// 96 KB hide DRAM.
#include "sm90/mla_few/output_staged.cuh"

namespace folio::mla_few {

#if FOLIO_DS_MLA
using Format = Bytes<FOLIO_KV, true>;
#else
template <class T, bool FP8>
struct FormatOf {
    using Type = Halves<T>;
};
template <class T>
struct FormatOf<T, true> {
    using Type = Bytes<T, false>;
};
using Format = FormatOf<FOLIO_KV, FOLIO_KV::IS_FP8>::Type;
#endif

using Layout = Memory<Format>;
constexpr int CONSUMER_WARPS = 4 * CONSUMERS;
constexpr int BARRIERS = Layout::STATISTICS + static_cast<int>(sizeof(Statistics<Format>));
static_assert(BARRIERS % 8 == 0 && BARRIERS + 16 * Format::SLOTS <= FOLIO_SHARED_BYTES, "the row's shared memory");
static_assert(FOLIO_SHARED_BYTES <= 232448);

// Writes zeros over the latent parts of tokens that no row sees: 0 x NaN would reach the output. For 16-bit records.
template <class Format>
__device__ __forceinline__ void clear_values(u32 tile, i32 token, i32 tokens, i32 begin, i32 end) {
    constexpr u32 CHUNKS = Format::LATENT_BYTES / 16;
    const u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (u32 piece = threadIdx.x % GROUP_THREADS; piece < static_cast<u32>(tokens) * CHUNKS; piece += GROUP_THREADS) {
        const u32 row = piece / CHUNKS;
        const i32 key = token + static_cast<i32>(row);
        if (key < begin || key >= end) st_shared_v4(tile + Format::chunk(row, piece % CHUNKS), zeros);
    }
}

// Of `slots` slots from the cursor's on, with `before` slots before them.
__device__ __forceinline__ TileView view(const Ring<Format> &ring, const Cursor<Format> &cursor, u32 slots,
                                         u32 before) {
    constexpr u32 STEPS = Format::SLOT_TOKENS / 16;
    Cursor<Format> second = cursor;
    if (slots > 1) second.advance(1);
    // The same in all lanes: descriptors can be in uniform registers.
    const u32 first = __shfl_sync(FULL_WARP, ring.slot(cursor.slot - before), 0);
    return {first, ring.slot(second.slot), before * STEPS, __shfl_sync(FULL_WARP, (before + slots) * STEPS, 0)};
}

template <class Loader>
__device__ __forceinline__ void consume(const FolioMlaFewParams &params, const Ring<Format> &ring, u8 *shared,
                                        u32 group, u32 warp, u32 lane) {
    Statistics<Format> &statistics = *reinterpret_cast<Statistics<Format> *>(shared + Layout::STATISTICS);
    const u32 queries = shared_address(shared);
    const u32 weights = queries + Layout::WEIGHTS + group * Layout::WEIGHT_COPIES * Layout::WEIGHT_BYTES;
    Softmax<Format> softmax;
    Cursor<Format> cursor;
    for_each_unit(params, [&](const Unit &unit) {
        QueryRows<Format>::load(params, unit, queries, statistics.powers, 4 * group + warp, lane);
        group_sync(1 + CONSUMERS, CONSUMER_WARPS * 32);
        softmax.begin(params, unit, statistics, lane);
        const Span<Format> span(params, unit);
        i32 token = span.first;
        u32 turn = 0;
#pragma unroll 1
        for (u32 left = span.slots; left > 0;) {
            u32 slots = min(left, static_cast<u32>(Format::TILE_SLOTS)), before = 0;
            if constexpr (!Format::WRAPS) {
                slots = min(slots, Format::SLOTS - cursor.slot);
                // Slots before the tile's make up the 64 tokens that a product takes, where the ring ends.
                const u32 end = cursor.slot + TILE_TOKENS / Format::SLOT_TOKENS;
                before = end > Format::SLOTS ? end - Format::SLOTS : 0;
            }
            Cursor<Format> at = cursor;
#pragma unroll 1
            for (u32 n = 0; n < slots; ++n, at.advance(1)) ring.wait_full(at);
            if (turn == group) {
                const i32 tokens = static_cast<i32>(slots * Format::SLOT_TOKENS);
                if constexpr (!Loader::ZERO_FILLS) {
                    const bool edge = token < span.begin || token + tokens > span.end;
                    if (edge) clear_values<Format>(ring.slot(cursor.slot), token, tokens, span.begin, span.end);
                } else if constexpr (!Format::FP8) {
                    // What cp.async wrote, for wgmma.
                    fence_proxy_async();
                }
                const i32 first_token = token - static_cast<i32>(before * Format::SLOT_TOKENS);
                softmax.add_tile(view(ring, cursor, slots, before), first_token, queries, weights, statistics, group,
                                 warp, lane);
                __syncwarp();
            }
            // Every consumer frees every slot, also those of the other's tiles: none is a round behind.
#pragma unroll 1
            for (u32 n = 0; n < slots; ++n, cursor.advance(1)) {
                if (lane == 0) mbarrier_arrive(ring.empty_barrier(cursor.slot));
            }
            left -= slots;
            token += static_cast<i32>(slots * Format::SLOT_TOKENS);
            turn ^= 1;
        }
        Output<Format>::store(params, unit, softmax, statistics, shared, group, warp, lane);
    });
}

template <template <class> class LoaderOf>
__device__ __forceinline__ void run(const FolioMlaFewParams &params, const TensorMap *latent, const TensorMap *rope) {
    extern __shared__ __align__(1024) u8 shared[];
    using Loader = LoaderOf<Format>;
    static_assert(FOLIO_THREADS == 32 * (CONSUMER_WARPS + Loader::WARPS), "the row's threads");
    const u32 base = shared_address(shared), warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0),
              lane = threadIdx.x % 32;
    const Ring<Format> ring = {base + Layout::RING, base + BARRIERS, base + BARRIERS + 8 * Format::SLOTS};
    if (threadIdx.x < Format::SLOTS) {
        mbarrier_init(ring.full_barrier(threadIdx.x), Loader::ARRIVALS);
        mbarrier_init(ring.empty_barrier(threadIdx.x), CONSUMER_WARPS);
        mbarrier_init_fence();
    }
    if (warp == CONSUMER_WARPS && lane == 0) Loader::prepare(latent, rope);
    __syncthreads();
    wait_for_prerequisites();
    // The combine kernel may start where there is room: it reads its part of the plan and waits for the results itself.
    allow_dependents();
    // Two consumer warpgroups and one that loads share 504 registers for each of 128 threads.
    constexpr bool DIVIDED = Format::FP8;
    static_assert(!DIVIDED || Loader::WARPS == 4, "whole warpgroups divide registers");
    if (warp < CONSUMER_WARPS) {
        if constexpr (DIVIDED) registers_grow<232>();
        consume<Loader>(params, ring, shared, warp / 4, warp % 4, lane);
    } else {
        if constexpr (DIVIDED) registers_shrink<40>();
        const Loader loader(params, ring, latent, rope, warp - CONSUMER_WARPS, lane);
        Cursor<Format> cursor;
        for_each_unit(params, [&](const Unit &unit) { loader.load(unit, cursor); });
    }
}

}  // namespace folio::mla_few

// How keys come, as in src/cuda/kernels/mla.rs.
#if FOLIO_MLA_KEYS == 2
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_sm90_mla_few_records(const __grid_constant__ FolioMlaFewParams params) {
    folio::mla_few::run<folio::mla_few::RecordLoader>(params, nullptr, nullptr);
}
#elif FOLIO_MLA_KEYS == 1
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_sm90_mla_few_gather(const __grid_constant__ FolioMlaFewParams params) {
    folio::mla_few::run<folio::mla_few::GatherLoader>(params, nullptr, nullptr);
}
#else
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_sm90_mla_few_tma(const __grid_constant__ FolioMlaFewParams params,
                           const __grid_constant__ folio::TensorMap latent,
                           const __grid_constant__ folio::TensorMap rope) {
    folio::mla_few::run<folio::mla_few::BoxLoader>(params, &latent, &rope);
}
#endif
