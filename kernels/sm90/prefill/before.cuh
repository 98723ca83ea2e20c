// What a tile's rows came to over other keys, where the run is added to that (FolioSum): the online softmax goes on from
// there. Only runs over keys in two parts have it. How results are stored is output.cuh's.
#pragma once

#include "sm90/prefill/softmax.cuh"

namespace folio::prefill {

// The lse of the thread's two rows, in base 2; -inf where a row begins anew. Read early: the first exponentials wait for it.
struct Before {
    float lse[2] = {minus_infinity(), minus_infinity()};

    __device__ __forceinline__ void read(const FolioAttentionParams &params, const Tile &tile) {
        if constexpr (AFTER) {
            const FolioSum &sum = sum_of(params);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                lse[r] = minus_infinity();
                // Parts of a split row are put together first.
                if (sum.o == nullptr || tile.partial != FOLIO_NO_PARTIAL || !has_row(tile, r)) continue;
                lse[r] = lse_in_base_2(sum.lse[row_of(params, tile, r)], params.flags);
            }
        }
    }

    // The output that goes with it.
    template <int N>
    __device__ __forceinline__ void load(float (&o)[N], const FolioAttentionParams &params, u32 columns,
                                         const Tile &tile) const {
#pragma unroll
        for (int i = 0; i < N; ++i) o[i] = 0.0f;
        if constexpr (AFTER) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (lse[r] == minus_infinity()) continue;
                const float *const row = sum_of(params).o + row_of(params, tile, r) * columns;
#pragma unroll
                for (int j = 0; j < N; j += 4) {
                    const u32 column = 2 * j + 2 * (threadIdx.x % 4);
                    if (column >= columns) continue;
                    const float2 x = *reinterpret_cast<const float2 *>(row + column);
                    o[j + 2 * r] = x.x;
                    o[j + 2 * r + 1] = x.y;
                }
            }
        }
    }

    // Leaves the lse as FOLIO_RUN_ENDS_SUM says, where all lanes of the rows have read it.
    __device__ __forceinline__ void leave(const FolioAttentionParams &params, const Tile &tile) const {
        if constexpr (AFTER) {
            __syncwarp();
            if (threadIdx.x % 4 != 0 || !(params.flags & FOLIO_RUN_ENDS_SUM)) return;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (lse[r] != minus_infinity()) sum_of(params).lse[row_of(params, tile, r)] = minus_infinity();
            }
        }
    }

    template <class State>
    __device__ __forceinline__ void begin(State &rows, const float (&scale)[2]) const {
        if constexpr (AFTER) rows.begin(lse, scale);
    }

private:
    static __device__ __forceinline__ const FolioSum &sum_of(const FolioAttentionParams &params) {
        return reinterpret_cast<const FolioPrefillParams &>(params).sum;
    }

    static __device__ __forceinline__ bool has_row(const Tile &tile, int r) {
        return tile.stored_position_of(first_row() + 8 * r) < tile.num_tokens;
    }

    static __device__ __forceinline__ i64 row_of(const FolioAttentionParams &params, const Tile &tile, int r) {
        const u32 row = first_row() + 8 * r;
        return static_cast<i64>(tile.token + tile.stored_position_of(row)) * params.num_qo_heads + tile.head_of(row);
    }
};

}  // namespace folio::prefill
