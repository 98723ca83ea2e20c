// Puts the partial results of split rows of MLA together: the second kernel of its runs. Rows are 512 columns or fewer,
// and there are many heads; combine.cu does the same for narrower rows, and for sinks and fp8 outputs.
//
// A warp takes 128 columns of a head, four for each lane, and all parts of the row; of a row with many parts eight warps
// share them. The kernel is short, so its time is the loads that wait for one another. All blocks run at the same time
// and share the rows that there are. A row's item and list of parts are read before the kernel that computes the parts
// has ended, and parts are asked for together with what they are weighted by.
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
        const bool inside = column < p.head_dim_vo;
        const float *const columns = p.plan.partial_o + head * p.head_dim_vo + (inside ? column : 0);
        Parts parts(p, columns, min(count, 32u), entries.rows[0], share);
        weigh(weights);
#pragma unroll
        for (int i = 0; i < BATCHES<SHARES>; ++i) {
            const u32 here = count > 32 * i ? min(count - 32 * i, 32u) : 0;
#pragma unroll 1
            for (u32 first = share; first < here; first += SHARES * IN_FLIGHT) {
                if (i > 0 || first != share) parts = Parts(p, columns, here, entries.rows[i], first);
                parts.add_to(values, here, weights[i], first);
            }
        }
    }

private:
    // What a lane has of a few parts of a batch, from the first on.
    struct Parts {
        float4 x[IN_FLIGHT];

        __device__ __forceinline__ Parts(const FolioCombineParams &p, const float *columns, u32 here, u32 rows,
                                         u32 first) {
#pragma unroll
            for (u32 n = 0; n < IN_FLIGHT; ++n) {
                const u32 part = first + n * SHARES;
                const u64 row = __shfl_sync(FULL_WARP, rows, part & 31);
                const float *const from = columns + row * (p.num_qo_heads * p.head_dim_vo);
                x[n] = part < here ? *reinterpret_cast<const float4 *>(from) : float4{};
            }
        }

        __device__ __forceinline__ void add_to(float4 &sum, u32 here, float weights, u32 first) const {
#pragma unroll
            for (u32 n = 0; n < IN_FLIGHT; ++n) {
                const u32 part = first + n * SHARES;
                const float weight = __shfl_sync(FULL_WARP, weights, part & 31);
                if (part < here) add_scaled(sum, weight, x[n]);
            }
        }
    };

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

// What block `block` of `blocks` has of a row: units of 128 columns of a head are dealt to the blocks in turn.
template <u32 SHARES>
__device__ __forceinline__ void combine_row(const FolioCombineParams &p, const FolioCombineItem &item, u32 block,
                                            u32 blocks) {
    __shared__ float4 sums[WARPS][32];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = warp % SHARES;
    constexpr u32 AT_ONCE = WARPS / SHARES, ENTRIES = 32 * BATCHES<SHARES>;
    const u32 *const list = p.plan.partials + item.first;
    const Entries<SHARES> first_entries(list, 0, item.count, lane);
    // Nothing after the first row.
    wait_for_prerequisites();
    allow_dependents();
    const u32 pieces = (p.head_dim_vo + WARP_COLUMNS - 1) / WARP_COLUMNS, units = p.num_qo_heads * pieces;
#pragma unroll 1
    for (u32 unit = warp / SHARES * blocks + block; unit < units; unit += AT_ONCE * blocks) {
        const u32 head = unit / pieces, column = (unit - head * pieces) * WARP_COLUMNS + 4 * lane;
        WarpSum<SHARES> sum;
        Entries<SHARES> entries = first_entries;
#pragma unroll 1
        for (u32 done = 0;;) {
            sum.add(p, item.count - done, entries, head, column, share, lane);
            done += ENTRIES;
            if (SHARES == 1 || done >= item.count) break;
            entries = Entries<SHARES>(list, done, item.count, lane);
        }
        if (SHARES > 1) {
            sums[warp][lane] = sum.values;
            __syncthreads();
            for (u32 i = 1; share == 0 && i < SHARES; ++i) add_scaled(sum.values, 1.0f, sums[warp + i][lane]);
            __syncthreads();
        }
        if (share == 0 && column < p.head_dim_vo) store(p, item.q_token, head, column, sum.values, sum.state);
    }
}

}  // namespace folio

// Four CTAs on a multiprocessor: 64 registers.
extern "C" __global__ void __launch_bounds__(32 * folio::WARPS, 4)
    folio_combine_latent(const __grid_constant__ FolioCombineParams p) {
    using namespace folio;
    const u32 rows = p.plan.counts[FOLIO_COUNT_COMBINES], blocks_of_row = max(gridDim.x / max(rows, 1u), 1u);
    const u32 rows_at_once = gridDim.x / blocks_of_row, first = blockIdx.x / blocks_of_row;
    const u32 block = blockIdx.x - first * blocks_of_row;
    // Of blocks without a row one waits: what comes after this grid comes after the one before it.
    if (blockIdx.x == 0 && rows == 0) wait_for_prerequisites();
    if (first >= rows_at_once) return;
#pragma unroll 1
    for (u32 row = first; row < rows; row += rows_at_once) {
        const FolioCombineItem item = p.plan.combines[row];
        if (item.q_token >= p.num_tokens) {
            wait_for_prerequisites();
        } else if (item.count <= MOST_PARTS_OF_A_WARP) {
            combine_row<1>(p, item, block, blocks_of_row);
        } else {
            combine_row<WARPS>(p, item, block, blocks_of_row);
        }
    }
}
