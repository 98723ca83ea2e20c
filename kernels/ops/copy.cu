// Copies pages of a cache, keys and values in one launch. A warp takes a piece of a page, so that few large pages fill the
// device as many small ones do. Pairs in device memory are unchecked: one whose pages do not exist is skipped. Pages may
// be in host memory that the device can reach.
#include "core/elements.cuh"
#include "core/paged.cuh"
#include "params/copy.h"

namespace folio {

constexpr u32 WARP = 32;

// Units that a lane has on their way at once; src/cuda/ops/copy.rs cuts pages by it. 64 warps of a multiprocessor have 64
// KiB then. With four units, copies of random pages are 1.5 % slower.
constexpr u32 UNITS_OF_LANE = 2;

struct PagePair {
    i64 src, dst;
};

// Loads are plain: those that are evicted first copy 3 % less in a second.
template <class Unit>
__device__ __forceinline__ void copy_piece(const FolioPagesToCopy &pages, const PagePair &pair, u32 piece) {
    const u8 *const from = static_cast<const u8 *>(pages.src) + pair.src * pages.src_stride;
    u8 *const to = static_cast<u8 *>(pages.dst) + pair.dst * pages.dst_stride;
    const i64 end = pages.page_bytes / static_cast<i64>(sizeof(Unit));
    const i64 first = static_cast<i64>(piece) * (UNITS_OF_LANE * WARP) + threadIdx.x % WARP;
    Unit units[UNITS_OF_LANE];
#pragma unroll
    for (u32 i = 0; i < UNITS_OF_LANE; i++) {
        if (first + i * WARP < end) units[i] = reinterpret_cast<const Unit *>(from)[first + i * WARP];
    }
#pragma unroll
    for (u32 i = 0; i < UNITS_OF_LANE; i++) {
        if (first + i * WARP < end) reinterpret_cast<Unit *>(to)[first + i * WARP] = units[i];
    }
}

// pair(n) is the n-th pair.
template <class Pair>
__device__ __forceinline__ void copy(const FolioKvCopyParams &p, const Pair &pair_at) {
    wait_for_prerequisites();
    const i64 all = static_cast<i64>(blockIdx.x) * (FOLIO_THREADS / WARP) + threadIdx.x / WARP;
    if (all >= p.num_pieces) return;
    const u32 index = divide(static_cast<u32>(all), p.pair_pieces);
    const u32 piece = static_cast<u32>(all) - index * p.pair_pieces.divisor;
    const PagePair pair = pair_at(index);
    if (pair.src < 0 || pair.src >= p.src_pages || pair.dst < 0 || pair.dst >= p.dst_pages) return;
    const bool is_k = piece < p.k.pieces;
    const FolioPagesToCopy pages = is_k ? p.k : p.v;
    const u32 piece_of_page = is_k ? piece : piece - p.k.pieces;
    switch (p.unit_bytes) {
        case 16: copy_piece<uint4>(pages, pair, piece_of_page); break;
        case 4: copy_piece<u32>(pages, pair, piece_of_page); break;
        case 2: copy_piece<u16>(pages, pair, piece_of_page); break;
        default: copy_piece<u8>(pages, pair, piece_of_page); break;
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
