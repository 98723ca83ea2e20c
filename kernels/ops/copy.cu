// Copies pages of a cache, keys and values in one launch. A warp takes a piece of a page, so that few large pages fill the
// device as many small ones do; of pages that are smaller than pieces it takes as many as it has lanes for. Pairs in device
// memory are unchecked: one whose pages do not exist is skipped. Pages may be in host memory that the device can reach.
#include "core/elements.cuh"
#include "core/paged.cuh"
#include "params/copy.h"

namespace folio {

constexpr u32 WARP = 32;

// Units that a lane has on their way at once; src/cuda/ops/copy.rs cuts pages by it. 64 warps of a multiprocessor have 128
// KiB then, several times what latency times bandwidth asks for.
constexpr u32 UNITS_OF_LANE = 4;

struct PagePair {
    i64 src, dst;
};

__device__ __forceinline__ uint4 load_unit(const uint4 *unit) { return load_evict_first(unit); }

template <class Unit>
__device__ __forceinline__ Unit load_unit(const Unit *unit) {
    return *unit;
}

template <class Unit>
__device__ __forceinline__ void copy_piece(const FolioPagesToCopy &pages, const PagePair &pair, u32 piece) {
    const u8 *const from = static_cast<const u8 *>(pages.src) + pair.src * pages.src_stride;
    u8 *const to = static_cast<u8 *>(pages.dst) + pair.dst * pages.dst_stride;
    const i64 end = pages.page_bytes / static_cast<i64>(sizeof(Unit));
    const i64 first = static_cast<i64>(piece) * (UNITS_OF_LANE * WARP) + threadIdx.x % WARP;
    Unit units[UNITS_OF_LANE];
#pragma unroll
    for (u32 i = 0; i < UNITS_OF_LANE; i++) {
        if (first + i * WARP < end) units[i] = load_unit(reinterpret_cast<const Unit *>(from) + first + i * WARP);
    }
#pragma unroll
    for (u32 i = 0; i < UNITS_OF_LANE; i++) {
        if (first + i * WARP < end) reinterpret_cast<Unit *>(to)[first + i * WARP] = units[i];
    }
}

__device__ __forceinline__ bool exists(const FolioKvCopyParams &p, const PagePair &pair) {
    return pair.src >= 0 && pair.src < p.src_pages && pair.dst >= 0 && pair.dst < p.dst_pages;
}

// A unit of all pairs, which stand one behind another.
struct UnitPlace {
    PagePair pair;
    u32 unit;  // of the pair

    template <class Pair>
    __device__ __forceinline__ UnitPlace(const FolioKvCopyParams &p, u32 at, const Pair &pair_at) {
        const u32 index = divide(at, p.pair_units);
        unit = at - index * p.pair_units.divisor;
        pair = pair_at(index);
    }

    template <class Unit>
    __device__ __forceinline__ const Unit *source(const FolioKvCopyParams &p) const {
        const FolioPagesToCopy &pages = unit < p.k_units ? p.k : p.v;
        return reinterpret_cast<const Unit *>(static_cast<const u8 *>(pages.src) + pair.src * pages.src_stride) + of_page(p);
    }

    template <class Unit>
    __device__ __forceinline__ Unit *target(const FolioKvCopyParams &p) const {
        const FolioPagesToCopy &pages = unit < p.k_units ? p.k : p.v;
        return reinterpret_cast<Unit *>(static_cast<u8 *>(pages.dst) + pair.dst * pages.dst_stride) + of_page(p);
    }

private:
    __device__ __forceinline__ u32 of_page(const FolioKvCopyParams &p) const {
        return unit < p.k_units ? unit : unit - p.k_units;
    }
};

// As many units as a piece has, by warp.
template <class Unit, class Pair>
__device__ __forceinline__ void copy_units(const FolioKvCopyParams &p, u32 warp, const Pair &pair_at) {
    const u32 first = warp * (UNITS_OF_LANE * WARP) + threadIdx.x % WARP;
    Unit units[UNITS_OF_LANE];
    bool is_there[UNITS_OF_LANE];
    Unit *targets[UNITS_OF_LANE];
#pragma unroll
    for (u32 i = 0; i < UNITS_OF_LANE; i++) {
        const UnitPlace place(p, min(first + i * WARP, p.num_units - 1), pair_at);
        is_there[i] = first + i * WARP < p.num_units && exists(p, place.pair);
        targets[i] = place.template target<Unit>(p);
        if (is_there[i]) units[i] = load_unit(place.template source<Unit>(p));
    }
#pragma unroll
    for (u32 i = 0; i < UNITS_OF_LANE; i++) {
        if (is_there[i]) *targets[i] = units[i];
    }
}

// A piece of a page by warp.
template <class Unit, class Pair>
__device__ __forceinline__ void copy_piece(const FolioKvCopyParams &p, u32 warp, const Pair &pair_at) {
    const u32 index = divide(warp, p.pair_pieces), piece = warp - index * p.pair_pieces.divisor;
    const PagePair pair = pair_at(index);
    if (!exists(p, pair)) return;
    if (piece < p.k.pieces) {
        copy_piece<Unit>(p.k, pair, piece);
    } else {
        copy_piece<Unit>(p.v, pair, piece - p.k.pieces);
    }
}

template <class Unit, class Pair>
__device__ __forceinline__ void copy_as(const FolioKvCopyParams &p, u32 warp, const Pair &pair_at) {
    if (p.num_units > 0) {
        copy_units<Unit>(p, warp, pair_at);
    } else {
        copy_piece<Unit>(p, warp, pair_at);
    }
}

// pair_at(n) is the n-th pair.
template <class Pair>
__device__ __forceinline__ void copy(const FolioKvCopyParams &p, const Pair &pair_at) {
    wait_for_prerequisites();
    const i64 warp = static_cast<i64>(blockIdx.x) * (FOLIO_THREADS / WARP) + threadIdx.x / WARP;
    if (warp >= p.num_pieces) return;
    switch (p.unit_bytes) {
        case 16: copy_as<uint4>(p, static_cast<u32>(warp), pair_at); break;
        case 4: copy_as<u32>(p, static_cast<u32>(warp), pair_at); break;
        case 2: copy_as<u16>(p, static_cast<u32>(warp), pair_at); break;
        default: copy_as<u8>(p, static_cast<u32>(warp), pair_at); break;
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS) folio_kv_copy(const __grid_constant__ FolioKvCopyParams p) {
    using namespace folio;
    copy(p, [&](u32 index) {
        const i64 at = 2 * static_cast<i64>(index);
        if (p.pair_bytes == 8) {
            const i32 *const pairs = static_cast<const i32 *>(p.pairs);
            return PagePair{pairs[at], pairs[at + 1]};
        }
        const i64 *const pairs = static_cast<const i64 *>(p.pairs);
        return PagePair{pairs[at], pairs[at + 1]};
    });
}

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_kv_copy_list(const __grid_constant__ FolioKvCopyList list) {
    using namespace folio;
    copy(list.copy, [&](u32 index) { return PagePair{list.pairs[2 * index], list.pairs[2 * index + 1]}; });
}
