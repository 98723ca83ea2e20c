// The end of the kernels over caches in other forms: states of all warps go through shared memory. There a row's columns
// can be counted at run time, those of warps with other keys are merged, and channels' scales and zero points applied.
#pragma once
#include "generic/output_row.cuh"
#include "generic/stored_channels.cuh"
#include "generic/work.cuh"

namespace folio {

// States of ROWS rows from SPLITS parts of the keys, in `memory`.
template <int SPLITS, int ROWS, int DIM>
struct SharedStates {
    // Lanes of neighbouring rows use different banks.
    static constexpr int FLOATS_OF_ROW = DIM + 8, BYTES = SPLITS * ROWS * (FLOATS_OF_ROW * 4 + 8);
    float *values;
    RowState *states;

    __device__ __forceinline__ explicit SharedStates(void *memory)
        : values(static_cast<float *>(memory)),
          states(reinterpret_cast<RowState *>(values + SPLITS * ROWS * FLOATS_OF_ROW)) {}

    __device__ __forceinline__ float *row(u32 split, u32 row) const {
        return values + (split * ROWS + row) * FLOATS_OF_ROW;
    }
    __device__ __forceinline__ RowState &state(u32 split, u32 row) const { return states[split * ROWS + row]; }

    // What is there becomes the work's results. One warp for a row; the order of splits is fixed, so
    // results are the same in every run.
    __device__ __forceinline__ void store(const FolioGenericParams &g, const Work &work,
                                          const Channels &channels) const {
#pragma unroll 1
        for (u32 row = threadIdx.x / 32; row < ROWS && work.first_row + row < work.num_rows;
             row += FOLIO_THREADS / 32) {
            RowState total = {minus_infinity(), 0.0f};
            float weights[SPLITS];
#pragma unroll
            for (int i = 0; i < SPLITS; i++) total.max = fmaxf(total.max, state(i, row).max);
#pragma unroll
            for (int i = 0; i < SPLITS; i++) {
                weights[i] = exp2_approx(state(i, row).max - exponent_base(total.max));
                total.sum += weights[i] * state(i, row).sum;
            }
            const OutputRow out(g.attention, g, *work.item, work.kv_head, work.first_row + row, total);
#pragma unroll 1
            for (u32 column = 2 * (threadIdx.x % 32); column < g.head_dim_vo; column += 64) {
                float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int i = 0; i < SPLITS; i++) {
                    const float2 part = *reinterpret_cast<const float2 *>(this->row(i, row) + column);
                    sum.x += weights[i] * part.x;
                    sum.y += weights[i] * part.y;
                }
                store_columns(out, channels, column, sum.x, sum.y, total.sum);
            }
            if (threadIdx.x % 32 == 0) out.store_lse();
        }
    }

private:
    // Two neighbouring columns of a row, of whose probabilities `sum` is the sum.
    static __device__ __forceinline__ void store_columns(const OutputRow &out, const Channels &channels, u32 column,
                                                         float x, float y, float sum) {
        if (channels.zeros) x -= channels.zeros[column] * sum, y -= channels.zeros[column + 1] * sum;
        if (channels.scales) x *= channels.scales[column], y *= channels.scales[column + 1];
        out.store(column, x, y);
    }
};

}  // namespace folio
