// Puts the partial results of split rows of MLA together: the second kernel of its runs. Rows are 512 columns or fewer,
// and there are many heads; combine.cu does the same for narrower rows, and for sinks and fp8 outputs.
//
// A warp takes 128 columns of a head, four for each lane, and all parts of the row; of a row with many parts eight warps
// share them. The kernel is short, so its time is the loads that wait for one another, and how many warps there are to
// wait at the same time: few registers are worth more than many loads in flight. The list of parts is read before the
// kernel that computes them has ended.
#include "core/softmax.cuh"

namespace folio {

constexpr u32 WARPS = 8, WARP_COLUMNS = 128, IN_FLIGHT = 4;
// A row of more parts than one list entry for each lane has eight warps for every 128 columns of a head. They read two
// entries for each lane at a time.
constexpr u32 MOST_PARTS_OF_A_WARP = 32;
template <u32 SHARES>
constexpr int BATCHES = SHARES == 1 ? 1 : 2;

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, lanes));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(FULL_WARP, x, lanes);
    return x;
}

__device__ __forceinline__ float4 scaled(float4 x, float f) { return {x.x * f, x.y * f, x.z * f, x.w * f}; }

__device__ __forceinline__ void add_scaled(float4 &sum, float factor, float4 x) {
    sum.x += factor * x.x;
    sum.y += factor * x.y;
    sum.z += factor * x.z;
    sum.w += factor * x.w;
}

// The lane's entries of a row's list of parts.
template <u32 SHARES>
struct Entries {
    u32 rows[BATCHES<SHARES>];

    __device__ __forceinline__ Entries(const u32 *list, u32 first, u32 count, u32 lane) {
#pragma unroll
        for (int i = 0; i < BATCHES<SHARES>; ++i) {
            const u32 part = first + 32 * i + lane;
            rows[i] = part < count ? list[part] : 0;
        }
    }
};

// The weighted sum of a warp's parts, which are every SHARES-th, and the state of all.
template <u32 SHARES>
class WarpSum {
public:
    float4 values = {};
    RowState state = {minus_infinity(), 0.0f};

    __device__ __forceinline__ void add(const FolioCombineParams &p, u32 count, const Entries<SHARES> &entries,
                                        u32 head, u32 column, u32 share, u32 lane) {
        float weights[BATCHES<SHARES>];
#pragma unroll
        for (int i = 0; i < BATCHES<SHARES>; ++i) {
            const i64 at = static_cast<i64>(entries.rows[i]) * p.num_qo_heads + head;
            weights[i] = 32 * i + lane < count ? p.plan.partial_lse[at] : minus_infinity();
        }
        weigh(weights);
#pragma unroll
        for (int i = 0; i < BATCHES<SHARES>; ++i) {
            const u32 here = count > 32 * i ? min(count - 32 * i, 32u) : 0;
#pragma unroll 1
            for (u32 first = share; first < here; first += SHARES * IN_FLIGHT) {
                float4 x[IN_FLIGHT];
#pragma unroll
                for (u32 n = 0; n < IN_FLIGHT; ++n) {
                    const u32 part = first + n * SHARES;
                    const i64 row = __shfl_sync(FULL_WARP, entries.rows[i], part & 31);
                    const i64 from = (row * p.num_qo_heads + head) * p.head_dim_vo + column;
                    const bool exists = part < here && column < p.head_dim_vo;
                    x[n] = exists ? *reinterpret_cast<const float4 *>(p.plan.partial_o + from) : float4{};
                }
#pragma unroll
                for (u32 n = 0; n < IN_FLIGHT; ++n) {
                    const u32 part = first + n * SHARES;
                    const float weight = __shfl_sync(FULL_WARP, weights[i], part & 31);
                    if (part < here) add_scaled(values, weight, x[n]);
                }
            }
        }
    }

private:
    // Makes weights of the lse, and takes them into the state.
    __device__ __forceinline__ void weigh(float (&lse)[BATCHES<SHARES>]) {
        float max = lse[0], sum = 0.0f;
#pragma unroll
        for (int i = 1; i < BATCHES<SHARES>; ++i) max = fmaxf(max, lse[i]);
        max = fmaxf(state.max, warp_max(max));
        const float base = exponent_base(max), before = exp2_approx(state.max - base);
#pragma unroll
        for (int i = 0; i < BATCHES<SHARES>; ++i) lse[i] = exp2_approx(lse[i] - base), sum += lse[i];
        state = {max, state.sum * before + warp_sum(sum)};
        values = scaled(values, before);
    }
};

__device__ __forceinline__ void store(const FolioCombineParams &p, u32 token, u32 head, u32 column, float4 x,
                                      const RowState &state) {
    const float factor = state.sum == 0.0f ? 0.0f : p.v_scale / state.sum;
    const i64 at = static_cast<i64>(token) * p.o.stride_token + head * p.o.stride_head + column;
    store_pair(p.o.data, p.o_dtype, at, x.x * factor, x.y * factor);
    store_pair(p.o.data, p.o_dtype, at + 2, x.z * factor, x.w * factor);
    if (column == 0 && p.lse) {
        p.lse[static_cast<i64>(token) * p.lse_stride_token + head * p.lse_stride_head] =
            lse_in_base(log_sum_exp(state), p.flags);
    }
}

// Takes a row's heads and columns in turn with the row's other CTAs.
template <u32 SHARES>
__device__ __forceinline__ void combine_row(const FolioCombineParams &p, const FolioCombineItem &item, u32 block) {
    __shared__ float4 sums[WARPS][32];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = warp % SHARES;
    const u32 *const list = p.plan.partials + item.first;
    const Entries<SHARES> first_entries(list, 0, item.count, lane);
    wait_for_prerequisites();
    allow_dependents();
    constexpr u32 AT_ONCE = WARPS / SHARES, ENTRIES = 32 * BATCHES<SHARES>;
    const u32 pieces = (p.head_dim_vo + WARP_COLUMNS - 1) / WARP_COLUMNS, units = p.num_qo_heads * pieces;
    for (u32 first = block * AT_ONCE; first < units; first += p.blocks_of_row * AT_ONCE) {
        const u32 unit = min(first + warp / SHARES, units - 1);
        const u32 head = unit / pieces, column = (unit - head * pieces) * WARP_COLUMNS + 4 * lane;
        WarpSum<SHARES> sum;
        sum.add(p, item.count, first_entries, head, column, share, lane);
#pragma unroll 1
        for (u32 done = ENTRIES; done < item.count; done += ENTRIES) {
            sum.add(p, item.count - done, Entries<SHARES>(list, done, item.count, lane), head, column, share, lane);
        }
        if (SHARES > 1) {
            sums[warp][lane] = sum.values;
            __syncthreads();
            for (u32 i = 1; share == 0 && i < SHARES; ++i) add_scaled(sum.values, 1.0f, sums[warp + i][lane]);
            __syncthreads();
        }
        if (share == 0 && first + warp / SHARES < units && column < p.head_dim_vo) {
            store(p, item.q_token, head, column, sum.values, sum.state);
        }
    }
}

}  // namespace folio

// Four CTAs on a multiprocessor: 64 registers.
extern "C" __global__ void __launch_bounds__(32 * folio::WARPS, 4)
    folio_combine_latent(const __grid_constant__ FolioCombineParams p) {
    using namespace folio;
    const u32 index = blockIdx.x / p.blocks_of_row, block = blockIdx.x - index * p.blocks_of_row;
    FolioCombineItem item = {};
    if (index < p.plan.counts[1]) item = p.plan.combines[index];
    if (item.count == 0 || item.q_token >= p.num_tokens) {
        wait_for_prerequisites();
    } else if (item.count <= MOST_PARTS_OF_A_WARP) {
        combine_row<1>(p, item, block);
    } else {
        combine_row<WARPS>(p, item, block);
    }
}
