// Puts the partial results of split rows together: the second kernel of a run. It adds the sink, once,
// scales and rounds the output. (Merging the caller's own states is ops/merge.cu.)
//
// One CTA takes query heads of the rows of one merge item in turn. Its eight warps share the chunks, several
// in flight each, in an order that depends on nothing but the item; lane i has columns 4i .. 4i + 3 and, above
// 128, 128 + 4i .. 128 + 4i + 3. The kernel is short, so its time is the loads that wait for one another: what
// the split kernel did not write is read before that kernel has ended.
#include "core/softmax.cuh"

namespace folio {

constexpr u32 WARPS = 8, IN_FLIGHT = 4, MAX_DIM = 256, PIECES = MAX_DIM / 4, PASSES = PIECES / 32;

__device__ __forceinline__ void add_scaled(float4 &sum, float factor, float4 x) {
    sum.x += factor * x.x;
    sum.y += factor * x.y;
    sum.z += factor * x.z;
    sum.w += factor * x.w;
}

// Factor of what is relative to `max` for a sum relative to `larger`.
__device__ __forceinline__ float weight(float max, float larger) { return exp2_approx(max - exponent_base(larger)); }

// A weighted sum of chunks, at the lane's columns.
struct ChunkSum {
    RowState state;
    float4 values[PASSES];
};

// Partial results of one row and head: chunk c lies q_len rows after chunk c - 1.
struct Partials {
    const float *lse;
    const float4 *o;
    i64 lse_stride, o_stride;
    u32 num_chunks, pieces;

    __device__ __forceinline__ Partials(const FolioCombineParams &p, const FolioMergeItem &merge, u32 token, u32 head)
        : lse_stride(static_cast<i64>(merge.q_len) * p.num_qo_heads),
          num_chunks(merge.num_chunks),
          pieces(p.head_dim_vo / 4) {
        const i64 first = (static_cast<i64>(merge.partial) + token) * p.num_qo_heads + head;
        lse = p.plan.partial_lse + first;
        o = reinterpret_cast<const float4 *>(p.plan.partial_o) + first * pieces;
        o_stride = lse_stride * pieces;
    }

    // Chunks warp, warp + WARPS and so on.
    __device__ __forceinline__ ChunkSum sum(u32 warp, u32 lane) const {
        ChunkSum sum = {{minus_infinity(), 0.0f}, {}};
        for (u32 first = warp; first < num_chunks; first += WARPS * IN_FLIGHT) {
            float logits[IN_FLIGHT], max = sum.state.max;
            float4 x[IN_FLIGHT][PASSES];
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) {
                const u32 chunk = first + i * WARPS;
                const bool there = chunk < num_chunks;
                logits[i] = there ? lse[chunk * lse_stride] : minus_infinity();
#pragma unroll
                for (u32 n = 0; n < PASSES; n++) {
                    x[i][n] = there && lane + 32 * n < pieces ? o[chunk * o_stride + lane + 32 * n] : float4{};
                }
            }
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) max = fmaxf(max, logits[i]);
            const float before = weight(sum.state.max, max);
            sum.state = {max, sum.state.sum * before};
#pragma unroll
            for (u32 n = 0; n < PASSES; n++) {
                const float4 old = sum.values[n];
                sum.values[n] = {};
                add_scaled(sum.values[n], before, old);
            }
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) {
                const float w = weight(logits[i], max);
                sum.state.sum += w;
#pragma unroll
                for (u32 n = 0; n < PASSES; n++) add_scaled(sum.values[n], w, x[i][n]);
            }
        }
        return sum;
    }
};

// The warps' sums.
struct Sums {
    RowState states[WARPS];
    float4 values[WARPS][PIECES];

    __device__ __forceinline__ RowState total(u32 piece, float4 &sum) const {
        RowState total = states[0];
#pragma unroll
        for (u32 w = 1; w < WARPS; w++) total.max = fmaxf(total.max, states[w].max);
        total.sum = 0.0f;
        sum = {};
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) {
            const float factor = weight(states[w].max, total.max);
            total.sum += factor * states[w].sum;
            add_scaled(sum, factor, values[w][piece]);
        }
        return total;
    }
};

// Where a row's result goes, and what scales it.
struct Target {
    i64 token;
    u32 head;
    float sink, v_scale;

    __device__ __forceinline__ Target(const FolioCombineParams &p, const FolioMergeItem &merge, u32 row) {
        const u32 token_of_item = row / p.num_qo_heads;
        head = row - token_of_item * p.num_qo_heads;
        token = static_cast<i64>(p.plan.qo_indptr[merge.request]) + merge.q_start + token_of_item;
        sink = p.sinks ? p.sinks[head] * LOG2_E : minus_infinity();
        v_scale = p.v_scale * head_scale(p.v_scales, p.v_scales_stride, head / p.group_size);
        if (p.o_dtype >= FOLIO_E4M3) v_scale /= p.o_scale;
    }

    __device__ __forceinline__ void store(const FolioCombineParams &p, u32 column, float4 x, RowState state) const {
        const float correction = add_sink(state, sink);
        const float factor = state.sum == 0.0f ? 0.0f : correction / state.sum * v_scale;
        const i64 at = token * p.o.stride_token + head * p.o.stride_head + column;
        store_pair(p.o.data, p.o_dtype, at, x.x * factor, x.y * factor);
        store_pair(p.o.data, p.o_dtype, at + 2, x.z * factor, x.w * factor);
        if (column == 0 && p.lse) {
            p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = lse_in_base(log_sum_exp(state), p.flags);
        }
    }
};

__device__ __forceinline__ void combine_row(const FolioCombineParams &p, const FolioMergeItem &merge,
                                            const Target &target, u32 token, Sums &sums) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Partials partials(p, merge, token, target.head);
    const ChunkSum sum = partials.sum(warp, lane);
    if (lane == 0) sums.states[warp] = sum.state;
#pragma unroll
    for (u32 n = 0; n < PASSES; n++) sums.values[warp][lane + 32 * n] = sum.values[n];
    __syncthreads();
    if (threadIdx.x < partials.pieces) {
        float4 x;
        const RowState state = sums.total(threadIdx.x, x);
        target.store(p, 4 * threadIdx.x, x, state);
    }
    __syncthreads();
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(32 * folio::WARPS)
    folio_combine(const __grid_constant__ FolioCombineParams p) {
    using namespace folio;
    __shared__ Sums sums;
    const u32 index = blockIdx.x / p.row_blocks, first = blockIdx.x - index * p.row_blocks;
    if (index >= p.plan.counts[1]) {
        wait_for_prerequisites();
        return;
    }
    const FolioMergeItem merge = p.plan.merges[index];
    const u32 rows = merge.q_len * p.num_qo_heads;
    for (u32 row = first; row < rows; row += p.row_blocks) {
        const Target target(p, merge, row);
        if (row == first) {
            wait_for_prerequisites();
            allow_dependents();
        }
        combine_row(p, merge, target, row / p.num_qo_heads, sums);
    }
    if (first >= rows) wait_for_prerequisites();
}
