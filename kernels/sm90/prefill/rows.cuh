// The producer warpgroup of the Hopper prefill kernel where tensor maps do not describe K and V: pages of any size and
// at any distance, rows of any stride, types that are converted. Three warps load, in pieces of as many rows as a warp
// copies at once: they share the rows of every step, or take K or V of a step in turn; the fourth schedules, as in
// load.cuh. Here is where rows are and who has which; what is done with them is in copy_rows.cuh and convert_rows.cuh.
#pragma once

#include "core/paged.cuh"
#include "sm90/prefill/load.cuh"

namespace folio::prefill {

constexpr u32 ROW_LANES = Stored::row_bytes(64) / 16;  // lanes of 64 columns of a row, 16 bytes each
constexpr u32 PIECE_ROWS = 32 / ROW_LANES;
constexpr u32 SHARING_WARPS = CONVERTS ? 1 : FILLING_WARPS;
constexpr u32 PIECES = BLOCK / PIECE_ROWS, PIECES_OF_WARP = (PIECES + SHARING_WARPS - 1) / SHARING_WARPS;
constexpr u32 ROWS_OF_LANE = (PIECES_OF_WARP * PIECE_ROWS + 31) / 32;
static_assert(BLOCK % PIECE_ROWS == 0);

// Row `32 n + lane` of a warp's rows of a step is lane `lane`'s: where it is in the cache.
struct Places {
    i32 page[ROWS_OF_LANE];  // -1 past the last key
    u32 token[ROWS_OF_LANE];
};

// Addresses of a warp's rows of K or of V, held as Places are. 0: the cache does not have it, and it reads as zeros.
struct Addresses {
    u64 row[ROWS_OF_LANE];

    __device__ __forceinline__ Addresses(const FolioCache &cache, const Places &places, u32 num_pages, u32 head) {
#pragma unroll
        for (u32 n = 0; n < ROWS_OF_LANE; ++n) {
            const bool exists = static_cast<u32>(places.page[n]) < num_pages;
            row[n] = exists ? reinterpret_cast<u64>(Stored::row(cache, places.page[n], places.token[n], head)) : 0;
        }
    }

    // Of the lane's row of a piece.
    __device__ __forceinline__ u64 of_piece(u32 piece, u32 lane) const {
        const u32 first = piece * PIECE_ROWS;
        return __shfl_sync(FULL_WARP, row[first / 32], first % 32 + lane / ROW_LANES);
    }
};

// A warp of those that fill stages.
class RowWarp {
public:
    __device__ __forceinline__ RowWarp(const FolioPrefillParams &prefill, const KeyMaps &maps, const u8 *shared_bytes,
                                       u32 warp)
        : params(prefill.attention),
          prefill(prefill),
          maps(maps),
          shared(shared_address(shared_bytes)),
          warp(warp),
          lane(threadIdx.x % 32) {}

    // Its rows of a block of keys. Page ids are not waited for.
    __device__ __forceinline__ Places find(const Work &work, int block) const {
        Places places;
#pragma unroll
        for (u32 n = 0; n < ROWS_OF_LANE; ++n) {
            const u32 index = 32 * n + lane;
            const u32 row = (index / PIECE_ROWS * SHARING_WARPS + share()) * PIECE_ROWS + index % PIECE_ROWS;
            find_row(work, block * BLOCK + row, places.page[n], places.token[n]);
        }
        return places;
    }

    // Where a key of the tile's request is; page -1 past the last one.
    __device__ __forceinline__ void find_row(const Work &work, u32 key, i32 &page_of_cache, u32 &token) const {
        const u32 page = divide(key, prefill.page_size);
        token = key - page * prefill.page_size.divisor;
        page_of_cache = static_cast<int>(key) < work.kv_end ? page_id(work.source + page) : -1;
    }

    // Whether the warp has a piece of this number.
    __device__ __forceinline__ bool has_piece(u32 piece) const {
        return (piece + 1) * SHARING_WARPS <= PIECES || piece * SHARING_WARPS + share() < PIECES;
    }

    // Calls `each` with the number of every piece that the warp has.
    template <class Each>
    __device__ __forceinline__ void for_pieces(const Each &each) const {
#pragma unroll
        for (u32 piece = 0; piece < PIECES_OF_WARP; ++piece) {
            if (has_piece(piece)) each(piece);
        }
    }

    __device__ __forceinline__ void await_empty(u32 empty, const Ring<STAGES> &ring) const {
        mbarrier_wait(shared + empty + 8 * ring.index, ring.parity ^ 1);
    }

    // The warp's rows of a stage are there, written by ordinary stores.
    __device__ __forceinline__ void hand_over(u32 full, const Ring<STAGES> &ring) const {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared + full + 8 * ring.index);
    }

    const FolioAttentionParams &params;
    const FolioPrefillParams &prefill;
    const KeyMaps &maps;
    const u32 shared, warp, lane;

    // Of a row of the problem: what a tile's has beyond them reads as zeros.
    __device__ __forceinline__ u32 key_bytes() const { return Stored::row_bytes(prefill.head_dim_qk); }
    __device__ __forceinline__ u32 value_bytes() const { return Stored::row_bytes(prefill.head_dim_vo); }

private:
    // Number of the warp among those that share a step.
    __device__ __forceinline__ u32 share() const { return SHARING_WARPS > 1 ? warp : 0; }

    // Ragged rows are pages in order.
    __device__ __forceinline__ i32 page_id(i64 index) const {
        const i32 *ids = params.plan.page_ids;
        return ids != nullptr ? ids[index] : static_cast<i32>(index);
    }
};

template <class RowLoader>
__device__ __forceinline__ void produce_rows(const FolioPrefillParams &params, const TensorMap *q_map,
                                             const KeyMaps &maps, u8 *shared_bytes) {
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
    if (warp == FILLING_WARPS) {
        if (threadIdx.x % 32 == 0) Scheduler(params, q_map, shared_bytes).run();
        return;
    }
    RowLoader(RowWarp(params, maps, shared_bytes, warp), TileReader(shared_bytes)).run();
}

}  // namespace folio::prefill
