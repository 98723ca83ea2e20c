// Puts split rows together: a softmax-weighted sum of partial results, in the order of the chunks, whoever made
// them. Launched after a split kernel with programmatic dependent launch: everything but the partial results was
// written before that kernel began, so it is read while the split kernel still runs.
//
// Grid (num_qo_heads, query rows of the largest merge, merges); a CTA takes merges z, z + gridDim.z, ... below
// counts[1]. Four dimensions a thread; head_dim_vo / 4 threads make one chunk lane, and the lanes take chunks in
// turn, several loads in flight each.
#include "common/output.cuh"
#include "common/tma.cuh"
#include "params.h"

namespace folio {

constexpr unsigned kThreads = 256;
constexpr unsigned kInFlight = 4;
constexpr float kLog2E = 1.4426950408889634f;

// Weighted sum so far, relative to 2^peak.
struct Sum {
    float peak, total;
    float4 values;

    __device__ __forceinline__ void rescale(float new_peak) {
        const float f = peak == -kInfinity ? 0.f : exp2_approx(peak - new_peak);
        peak = new_peak;
        total *= f;
        values = make_float4(values.x * f, values.y * f, values.z * f, values.w * f);
    }

    // Weight 2^(lse - peak); nothing is taken of a chunk that saw nothing.
    __device__ __forceinline__ void add(float lse, float4 x, float count) {
        if (lse == -kInfinity) {
            return;
        }
        const float w = exp2_approx(lse - peak);
        total += w * count;
        values.x += w * x.x;
        values.y += w * x.y;
        values.z += w * x.z;
        values.w += w * x.w;
    }
};

__device__ __forceinline__ Sum sum_chunks(const FolioAttentionParams &params, const FolioMergeItem &merge,
                                          unsigned row, unsigned head, unsigned head_dim, unsigned first,
                                          unsigned step, unsigned column) {
    Sum sum{-kInfinity, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
    for (unsigned base = first; base < merge.num_chunks; base += kInFlight * step) {
        float lse[kInFlight], peak = sum.peak;
        float4 x[kInFlight];
#pragma unroll
        for (unsigned i = 0; i < kInFlight; ++i) {
            const unsigned chunk = base + i * step;
            const bool in = chunk < merge.num_chunks;
            const folio_i64 entry =
                static_cast<folio_i64>(merge.partial + (in ? chunk : base) * merge.q_len + row) * params.num_qo_heads + head;
            lse[i] = in ? __ldcg(params.plan.partial_lse + entry) : -kInfinity;
            x[i] = __ldcg(reinterpret_cast<const float4 *>(params.plan.partial_o + entry * head_dim + column));
        }
#pragma unroll
        for (unsigned i = 0; i < kInFlight; ++i) {
            peak = fmaxf(peak, lse[i]);
        }
        sum.rescale(peak);
#pragma unroll
        for (unsigned i = 0; i < kInFlight; ++i) {
            sum.add(lse[i], x[i], 1.f);
        }
    }
    return sum;
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(folio::kThreads)
folio_sm90_combine(const __grid_constant__ FolioAttentionParams params,
                   const __grid_constant__ FolioDecodeLaunch launch) {
    using namespace folio;
    __shared__ float4 values[kThreads];
    __shared__ float peaks[kThreads], totals[kThreads];
    const unsigned head = blockIdx.x, row = blockIdx.y;
    const unsigned pieces = launch.head_dim_vo / 4, lanes = kThreads / pieces;
    const unsigned lane = threadIdx.x / pieces, piece = threadIdx.x - lane * pieces;
    const unsigned num_merges = params.plan.counts[1];
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
        Sum sum{-kInfinity, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
        if (lane < lanes) {
            sum = sum_chunks(params, merge, row, head, launch.head_dim_vo, lane, lanes, piece * 4);
        }
        values[threadIdx.x] = sum.values;
        peaks[threadIdx.x] = sum.peak;
        totals[threadIdx.x] = sum.total;
        __syncthreads();
        if (lane == 0) {
            const unsigned used = min(lanes, merge.num_chunks);
            float peak = sum.peak;
            for (unsigned i = 1; i < used; ++i) {
                peak = fmaxf(peak, peaks[piece + i * pieces]);
            }
            sum.rescale(peak);
            for (unsigned i = 1; i < used; ++i) {
                sum.add(peaks[piece + i * pieces], values[piece + i * pieces], totals[piece + i * pieces]);
            }
            SoftmaxTotal total{sum.peak, sum.total};
            float rescale = 1.f;
            if (params.sinks) {
                total = add_sink(total, params.sinks[head] * kLog2E, rescale);
            }
            float scale = total.total == 0.f ? 0.f : rescale / total.total;
            scale *= output_scale(params, launch.output_type, head / launch.group_size);
            const float4 x = make_float4(sum.values.x * scale, sum.values.y * scale, sum.values.z * scale,
                                         sum.values.w * scale);
            store_output4(output_row(params.o, launch.output_type, token, head), launch.output_type, piece * 4, x);
            if (piece == 0 && params.lse) {
                const float unit = params.flags & FOLIO_RUN_LSE_BASE_2 ? 1.f : 1.f / kLog2E;
                params.lse[token * params.lse_stride_token + head * params.lse_stride_head] = total.base2_lse() * unit;
            }
        }
        __syncthreads();
    }
    if (!waited) {
        grid_dependency_wait();
    }
}
