// The end of a decode work item: the warps' sums are merged through shared memory, and rows are stored to the output,
// or to the partial results where the item is one chunk of several. No keys or values here.
#pragma once

#include "sm90/decode/channels.cuh"
#include "sm90/decode/softmax.cuh"
#include "sm90/decode/store.cuh"

namespace folio::decode {

// A warp's rows in shared memory; four floats of padding spread the stores over the banks.
constexpr int MERGE_PITCH = HEAD_DIM_VO + 4;
// Where they lie: a warp's part of its ring.
constexpr int MERGE_BYTES = Shape::ALL_RINGS_BYTES / WARPS;
static_assert(8 * COLUMN_TILES * MERGE_PITCH * 4 <= MERGE_BYTES && MERGE_BYTES % 16 == 0);

struct alignas(16) MergeState {
    float max[WARPS][8 * COLUMN_TILES], sum[WARPS][8 * COLUMN_TILES];
};
static_assert(sizeof(MergeState) == SUMS_BYTES);

// Leaves a warp's rows in shared memory, over its part of the rings, which are drained.
__device__ __forceinline__ void publish(const WarpState &state, MergeState &merge, float *rows, u32 num_rows, u32 warp,
                                        u32 lane) {
    const u32 g = lane >> 2;
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float sum = state.row_sum[c][j];
#pragma unroll
            for (int lanes = 4; lanes <= 16; lanes *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lanes);
            const u32 row = 2 * (lane & 3) + j;
            if (8 * (c % ROW_TILES) + row >= num_rows) continue;
            if (g == 0) {
                merge.max[warp][8 * c + row] = state.row_max[c][j];
                merge.sum[warp][8 * c + row] = sum;
            }
            float *out = rows + (8 * c + row) * MERGE_PITCH + Op::first_dim(g);
#pragma unroll
            for (int b = 0; b < WarpState::BLOCKS; ++b) {
                out[Op::block_dim(b)] = state.o[c][b][j];
                out[Op::block_dim(b) + Op::DIM_STEP] = state.o[c][b][2 + j];
            }
        }
    }
}

// Sums the rows of the key groups in their order and stores them.
__device__ __forceinline__ void merge_warps(const FolioPaddedDecodeParams &params, const Item &item,
                                            const MergeState &merge, const u8 *rings) {
    constexpr u32 PIECES = HEAD_DIM_VO / 4;
    for (u32 n = threadIdx.x; n < HEADS * item.num_rows * PIECES; n += THREADS) {
        const u32 head = HEADS == 2 && n >= item.num_rows * PIECES;
        const u32 row = n / PIECES - head * item.num_rows, column = n % PIECES * 4;
        if (column >= params.head_dim_vo) continue;
        const u32 slot = head * ROWS + row % WARP_ROWS, row_group = row / WARP_ROWS;
        RowState state = {merge.max[row_group][slot], 0.0f};
#pragma unroll
        for (int g = 1; g < KEY_GROUPS; ++g) {
            state.max = fmaxf(state.max, merge.max[g * ROW_GROUPS + row_group][slot]);
        }
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int g = 0; g < KEY_GROUPS; ++g) {
            const u32 w = g * ROW_GROUPS + row_group;
            const float weight = exp2_approx(merge.max[w][slot] - state.max);
            const float4 x = *reinterpret_cast<const float4 *>(rings + w * MERGE_BYTES +
                                                               (slot * MERGE_PITCH + column) * sizeof(float));
            sum.x += weight * x.x;
            sum.y += weight * x.y;
            sum.z += weight * x.z;
            sum.w += weight * x.w;
            state.sum += weight * merge.sum[w][slot];
        }
        const u32 kv_head = item.kv_head + head;
        const RowTarget target(params, item, kv_head, row, state, column == 0);
        if constexpr (CHANNEL_SCALES) {
            sum = channel_values(stored_params(params).cache.v, kv_head, column, sum, state.sum);
        }
        target.store(params, item, column, sum);
    }
}

}  // namespace folio::decode
