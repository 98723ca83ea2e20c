// Puts the partial results of split rows together: the second kernel of a run. It adds the sink, once,
// scales and rounds the output. (Merging the caller's own states is merge.cu.)
//
// One CTA takes query heads of the rows of one merge item in turn; its four warps share the chunks, in an
// order that depends on nothing but the item.
#include "common/softmax.cuh"

namespace folio {

constexpr u32 WARPS = 4, COLUMNS_PER_LANE = 4, MAX_DIM = 256, PASSES = MAX_DIM / (32 * COLUMNS_PER_LANE);

// Partial results of one row and head: chunk c lies q_len rows after chunk c - 1.
struct Partials {
    const float *lse, *o;
    i64 lse_stride, o_stride;
    u32 num_chunks;

    // Base-2 maximum and sum of all chunks; every lane of a warp holds the result.
    __device__ __forceinline__ RowState reduce() const {
        RowState total = {minus_infinity(), 0.0f};
        for (u32 c = threadIdx.x % 32; c < num_chunks; c += 32) total.max = fmaxf(total.max, lse[c * lse_stride]);
#pragma unroll
        for (int i = 16; i > 0; i /= 2) total.max = fmaxf(total.max, __shfl_xor_sync(FULL_WARP, total.max, i));
        const float base = exponent_base(total.max);
        for (u32 c = threadIdx.x % 32; c < num_chunks; c += 32) total.sum += exp2_approx(lse[c * lse_stride] - base);
#pragma unroll
        for (int i = 16; i > 0; i /= 2) total.sum += __shfl_xor_sync(FULL_WARP, total.sum, i);
        return total;
    }

    // Weighted sum of this warp's chunks, for this lane's columns of every pass.
    __device__ __forceinline__ void accumulate(float4 (&sum)[PASSES], float max, u32 dim) const {
        const float base = exponent_base(max);
        const u32 column = COLUMNS_PER_LANE * (threadIdx.x % 32);
#pragma unroll 4
        for (u32 c = threadIdx.x / 32; c < num_chunks; c += WARPS) {
            const float weight = exp2_approx(lse[c * lse_stride] - base);
#pragma unroll
            for (u32 i = 0; i < PASSES; i++) {
                if (column + 128 * i >= dim) break;
                const float4 x = *reinterpret_cast<const float4 *>(o + c * o_stride + column + 128 * i);
                sum[i].x += weight * x.x;
                sum[i].y += weight * x.y;
                sum[i].z += weight * x.z;
                sum[i].w += weight * x.w;
            }
        }
    }
};

__device__ __forceinline__ void combine_row(const FolioCombineParams &p, const FolioMergeItem &merge, u32 token, u32 head) {
    __shared__ float4 sums[WARPS][PASSES][32];
    const i64 first = (static_cast<i64>(merge.partial) + token) * p.num_qo_heads + head;
    const i64 stride = static_cast<i64>(merge.q_len) * p.num_qo_heads;
    const Partials partials = {p.plan.partial_lse + first, p.plan.partial_o + first * p.head_dim_vo, stride,
                               stride * p.head_dim_vo, merge.num_chunks};
    RowState state = partials.reduce();
    float4 sum[PASSES] = {};
    partials.accumulate(sum, state.max, p.head_dim_vo);
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < PASSES; i++) sums[warp][i][lane] = sum[i];
    __syncthreads();

    if (warp < PASSES) {
        float correction = 1.0f;
        if (p.sinks) correction = add_sink(state, p.sinks[head] * LOG2_E);
        const float v_scale = p.v_scale * head_scale(p.v_scales, p.v_scales_stride, head / p.group_size) / p.o_scale;
        const float factor = state.sum > 0.0f ? correction / state.sum * v_scale : 0.0f;
        const i64 out_token = static_cast<i64>(p.plan.qo_indptr[merge.request]) + merge.q_start + token;
        const u32 column = COLUMNS_PER_LANE * lane + 128 * warp;
        if (column < p.head_dim_vo) {
            float4 x = sums[0][warp][lane];
#pragma unroll
            for (u32 w = 1; w < WARPS; w++) {
                const float4 y = sums[w][warp][lane];
                x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
            }
            const i64 at = out_token * p.o.stride_token + head * p.o.stride_head + column;
            store_pair(p.o.data, p.o_dtype, at, x.x * factor, x.y * factor);
            store_pair(p.o.data, p.o_dtype, at + 2, x.z * factor, x.w * factor);
        }
        if (p.lse && threadIdx.x == 0) {
            p.lse[out_token * p.lse_stride_token + head * p.lse_stride_head] = lse_in_base(log_sum_exp(state), p.flags);
        }
    }
    __syncthreads();
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(32 * folio::WARPS)
    folio_combine(const __grid_constant__ FolioCombineParams p) {
    folio::wait_for_prerequisites();
    const folio_u32 index = blockIdx.x / p.row_blocks;
    if (index >= p.plan.counts[1]) return;
    const FolioMergeItem merge = p.plan.merges[index];
    const folio_u32 rows = merge.q_len * p.num_qo_heads;
    for (folio_u32 row = blockIdx.x % p.row_blocks; row < rows; row += p.row_blocks) {
        folio::combine_row(p, merge, row / p.num_qo_heads, row % p.num_qo_heads);
    }
}
