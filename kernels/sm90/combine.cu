// Puts split rows together: a softmax-weighted sum of partial results, in the order of the chunks, whoever made
// them. Launched after a split kernel with programmatic dependent launch: everything but the partial results was
// written before that kernel began, so it is read while the split kernel still runs.
//
// Grid (num_qo_heads, query rows of the largest merge, merges); a CTA takes merges z, z + gridDim.z, ... below
// counts[1]. Warp w sums chunks w, w + 8, ..., a few in flight; lane i has dimensions 4i .. 4i + 3 and, above 128,
// 128 + 4i .. 128 + 4i + 3. Then the eight sums are added. head_dim_vo is a multiple of 4, at most 256.
#include "common/output.cuh"
#include "common/tma.cuh"
#include "params.h"

namespace folio {

constexpr int kWarps = 8, kInFlight = 4, kPieces = 64;
constexpr float kLog2E = 1.4426950408889634f;

// A weighted sum, relative to 2^peak.
struct Sum {
    float peak, total;
    float4 values[2];
};

__device__ __forceinline__ float weight(float lse, float peak) {
    return lse == -kInfinity ? 0.f : exp2_approx(lse - peak);
}

__device__ __forceinline__ Sum sum_chunks(const FolioAttentionParams &params, const FolioMergeItem &merge,
                                          unsigned row, unsigned head, unsigned pieces, unsigned warp, unsigned lane) {
    const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
    Sum sum{-kInfinity, 0.f, {zero, zero}};
    for (unsigned first = warp; first < merge.num_chunks; first += kWarps * kInFlight) {
        float lse[kInFlight], peak = sum.peak;
        float4 x[kInFlight][2];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const unsigned chunk = first + i * kWarps;
            const bool present = chunk < merge.num_chunks;
            const folio_i64 entry =
                static_cast<folio_i64>(merge.partial + chunk * merge.q_len + row) * params.num_qo_heads + head;
            const float4 *o = reinterpret_cast<const float4 *>(params.plan.partial_o) + entry * pieces;
            lse[i] = present ? __ldcg(params.plan.partial_lse + entry) : -kInfinity;
            x[i][0] = present && lane < pieces ? __ldcg(o + lane) : zero;
            x[i][1] = present && lane + 32 < pieces ? __ldcg(o + lane + 32) : zero;
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            peak = fmaxf(peak, lse[i]);
        }
        const float stale = weight(sum.peak, peak);
        sum = {peak, sum.total * stale, {scaled(sum.values[0], stale), scaled(sum.values[1], stale)}};
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const float w = weight(lse[i], peak);
            sum.total += w;
            sum.values[0] = multiply_add(w, x[i][0], sum.values[0]);
            sum.values[1] = multiply_add(w, x[i][1], sum.values[1]);
        }
    }
    return sum;
}

struct Shared {
    float peak[kWarps], total[kWarps];
    float4 values[kWarps][kPieces];
};

// The sum of the warps' sums at one piece of the row.
__device__ __forceinline__ SoftmaxTotal sum_warps(const Shared &shared, unsigned piece, float4 &values) {
    float peak = shared.peak[0], total = 0.f;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
        peak = fmaxf(peak, shared.peak[w]);
    }
    values = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const float f = weight(shared.peak[w], peak);
        total += f * shared.total[w];
        values = multiply_add(f, shared.values[w][piece], values);
    }
    return {peak, total};
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(32 * folio::kWarps)
folio_sm90_combine(const __grid_constant__ FolioAttentionParams params,
                   const __grid_constant__ FolioDecodeLaunch launch) {
    using namespace folio;
    __shared__ Shared shared;
    const unsigned head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned pieces = launch.head_dim_vo / 4;
    const unsigned num_merges = params.plan.counts[1];
    const float scale = output_scale(params, launch.output_type, head / launch.group_size);
    const float sink = params.sinks ? params.sinks[head] * kLog2E : -kInfinity;
    bool waited = false;
    for (unsigned index = blockIdx.z; index < num_merges; index += gridDim.z) {
        const FolioMergeItem merge = params.plan.merges[index];
        const folio_i64 token = static_cast<folio_i64>(params.plan.qo_indptr[merge.request]) + merge.q_start + row;
        if (!waited) {
            grid_dependency_wait();
            grid_dependency_trigger();
            waited = true;
        }
        if (row >= merge.q_len) {
            continue;
        }
        const Sum sum = sum_chunks(params, merge, row, head, pieces, warp, lane);
        if (lane == 0) {
            shared.peak[warp] = sum.peak;
            shared.total[warp] = sum.total;
        }
        shared.values[warp][lane] = sum.values[0];
        shared.values[warp][lane + 32] = sum.values[1];
        __syncthreads();
        if (threadIdx.x < pieces) {
            float4 values;
            SoftmaxTotal total = sum_warps(shared, threadIdx.x, values);
            float rescale = 1.f;
            if (params.sinks) {
                total = add_sink(total, sink, rescale);
            }
            const float f = total.total == 0.f ? 0.f : rescale / total.total * scale;
            store_output4(output_row(params.o, launch.output_type, token, head), launch.output_type, threadIdx.x * 4,
                          scaled(values, f));
            if (threadIdx.x == 0 && params.lse) {
                store_lse(params, token, head, total);
            }
        }
        __syncthreads();
    }
    if (!waited) {
        grid_dependency_wait();
    }
}
