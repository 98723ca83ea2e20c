// Puts the partial results of split rows together: the second kernel of a run. It adds the sink, once,
// scales and rounds the output. (Merging the caller's own states is ops/merge.cu.)
//
// One CTA takes query heads of one split row in turn, and then those of another, where a graph's grid is less than as many rows as
// there may be. Its eight warps share the row's parts, several in flight each, or
// take a head each where one of them has all parts in flight; either way in an order that depends on nothing but their
// number. Where many rows are split, they take a head each too: heads in turn would wait for one another. Then a CTA has no
// more warps than a row has heads, where the host knows how many rows are split.
// Lane i has columns 4i .. 4i + 3 of every 128. The kernel is short, so its time is the loads that wait for one another:
// what the split kernel did not write, the list of parts included, is read before that kernel has ended.
//
// Compiled once per row of the kernel table, with FOLIO_MOST_COLUMNS, those of the widest rows, FOLIO_BY_ROWS: 1 where
// results may depend on how many rows are split, 0 where they must not, and FOLIO_ADDS: 1 for runs that are added to what
// their rows came to before, which takes more registers.
#include "core/softmax.cuh"

namespace folio {

constexpr u32 WARPS = 8, IN_FLIGHT = 4, PIECES = FOLIO_MOST_COLUMNS / 4, PASSES = PIECES / 32;
constexpr bool BY_ROWS = FOLIO_BY_ROWS, ADDS = FOLIO_ADDS;
constexpr u32 CTAS = PASSES <= 2 && !ADDS ? 4 : 2;  // per multiprocessor: a lane holds so many registers
// Twice what 132 multiprocessors run at a time.
constexpr u32 HEADS_AT_A_TIME = 1024;
static_assert(PIECES <= 32 * WARPS, "a thread per piece");

__device__ __forceinline__ void add_scaled(float4 &sum, float factor, float4 x) {
    sum.x += factor * x.x;
    sum.y += factor * x.y;
    sum.z += factor * x.z;
    sum.w += factor * x.w;
}

// Factor of what is relative to `max` for a sum relative to `larger`.
__device__ __forceinline__ float weight(float max, float larger) { return exp2_approx(max - exponent_base(larger)); }

// A weighted sum of parts, at the lane's columns.
struct PartSum {
    RowState state;
    float4 values[PASSES];
};

// The partial rows of a split row, of which a warp has numbers begin, begin + step and so on. The first ones are read
// with the row, further ones when they are needed.
struct Parts {
    const u32 *rows;
    u32 count;
    bool by_warp;  // a warp has all of them: few parts, or so many heads that CTAs would take them in turn
    u32 begin, step;
    u32 first_rows[IN_FLIGHT];

    // `num_heads`: of all split rows together.
    __device__ __forceinline__ Parts(const FolioCombineParams &p, const FolioCombineItem &item, u32 num_heads, u32 warp)
        : rows(p.plan.partials + item.first),
          count(item.count),
          by_warp(count <= IN_FLIGHT || (BY_ROWS && num_heads > HEADS_AT_A_TIME)),
          begin(by_warp ? 0 : warp),
          step(by_warp ? 1 : WARPS) {
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) {
            const u32 part = begin + i * step;
            first_rows[i] = part < count ? rows[part] : 0;
        }
    }

    __device__ __forceinline__ PartSum sum(const FolioCombineParams &p, u32 head, u32 lane) const {
        const u32 pieces = p.head_dim_vo / 4;
        const float4 *const o = reinterpret_cast<const float4 *>(p.plan.partial_o);
        PartSum sum = {{minus_infinity(), 0.0f}, {}};
        for (u32 first = begin; first < count; first += step * IN_FLIGHT) {
            float logits[IN_FLIGHT], max = sum.state.max;
            float4 x[IN_FLIGHT][PASSES];
#pragma unroll
            for (u32 i = 0; i < IN_FLIGHT; i++) {
                const u32 part = first + i * step;
                const bool there = part < count;
                const u32 row = first == begin ? first_rows[i] : there ? rows[part] : 0;
                const i64 at = static_cast<i64>(row) * p.num_qo_heads + head;
                logits[i] = there ? p.plan.partial_lse[at] : minus_infinity();
#pragma unroll
                for (u32 n = 0; n < PASSES; n++) {
                    x[i][n] = there && lane + 32 * n < pieces ? o[at * pieces + lane + 32 * n] : float4{};
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

// Where a row's result goes, and what scales it. What it came to before is a sink that has values.
struct Target {
    i64 token;
    u32 head;
    float sink, v_scale;
    const float *before;  // those values, or null

    __device__ __forceinline__ Target(const FolioCombineParams &p, const FolioCombineItem &item, u32 head)
        : token(item.q_token), head(head) {
        sink = p.sinks ? p.sinks[head] * LOG2_E : minus_infinity();
        before = nullptr;
        if constexpr (ADDS) {
            const i64 row = token * p.num_qo_heads + head;
            sink = lse_in_base_2(p.sum.lse[row], p.flags);
            if (sink != minus_infinity()) before = p.sum.o + row * p.head_dim_vo;
        }
        v_scale = p.v_scale * head_scale(p.v_scales, p.v_scales_stride, head / p.group_size);
        if (p.o_dtype >= FOLIO_E4M3) v_scale /= p.o_scale;
    }

    __device__ __forceinline__ void store(const FolioCombineParams &p, u32 column, float4 x, RowState state) const {
        const float correction = add_sink(state, sink);
        const float factor = state.sum == 0.0f ? 0.0f : correction / state.sum * v_scale;
        x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
        if (ADDS && before) {
            const float of_before = exp2_approx(sink - exponent_base(state.max)) / state.sum;
            add_scaled(x, of_before, *reinterpret_cast<const float4 *>(before + column));
        }
        const i64 at = token * p.o.stride_token + head * p.o.stride_head + column;
        store_pair(p.o.data, p.o_dtype, at, x.x, x.y);
        store_pair(p.o.data, p.o_dtype, at + 2, x.z, x.w);
        if (ADDS && column == 0 && p.flags & FOLIO_RUN_ENDS_SUM) {
            p.sum.lse[token * p.num_qo_heads + head] = minus_infinity();
        }
        if (column == 0 && p.lse) {
            p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = lse_in_base(log_sum_exp(state), p.flags);
        }
    }
};

__device__ __forceinline__ void combine_head(const FolioCombineParams &p, const Parts &parts, const Target &target,
                                             Sums &sums) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const PartSum sum = parts.sum(p, target.head, lane);
    if (lane == 0) sums.states[warp] = sum.state;
#pragma unroll
    for (u32 n = 0; n < PASSES; n++) sums.values[warp][lane + 32 * n] = sum.values[n];
    __syncthreads();
    if (4 * threadIdx.x < p.head_dim_vo) {
        float4 x;
        const RowState state = sums.total(threadIdx.x, x);
        target.store(p, 4 * threadIdx.x, x, state);
    }
    __syncthreads();
}

// CTAs that share a row's heads: a graph's grid is for as many rows as there may be, and few may be split.
__device__ __forceinline__ u32 shared_by(const FolioCombineParams &p, u32 rows) {
    if (p.blocks_of_row == p.num_qo_heads) return p.blocks_of_row;
    return min(max(gridDim.x / max(rows, 1u), p.blocks_of_row), p.num_qo_heads);
}

// Of CTAs without a row one waits: what comes after this grid comes after the one before it. The others make room, for a
// graph's grid may be more than runs at a time.
__device__ __forceinline__ void leave() {
    if (blockIdx.x == 0) wait_for_prerequisites();
}

// How rows are shared: each by so many CTAs, of which this is number `first`.
struct Sharing {
    u32 rows, first, blocks_of_row;
};

// Every warp takes heads of its own. The first CTA of a row has some, and waits; others may have none.
__device__ __forceinline__ void combine_by_warps(const FolioCombineParams &p, const FolioCombineItem &item,
                                                 const Parts &parts, const Sharing &sharing) {
    const u32 lane = threadIdx.x % 32, pieces = p.head_dim_vo / 4, block = sharing.first * WARPS;
    if (block >= p.num_qo_heads) return;
    wait_for_prerequisites();
    allow_dependents();
    for (u32 head = block + threadIdx.x / 32; head < p.num_qo_heads; head += sharing.blocks_of_row * WARPS) {
        const Target target(p, item, head);
        const PartSum sum = parts.sum(p, head, lane);
        // The lse of a sum may be stored where other lanes read it for their targets.
        if constexpr (ADDS) __syncwarp();
#pragma unroll
        for (u32 n = 0; n < PASSES; n++) {
            const u32 piece = lane + 32 * n;
            if (piece < pieces) target.store(p, 4 * piece, sum.values[n], sum.state);
        }
    }
}

__device__ __forceinline__ void combine_row(const FolioCombineParams &p, const FolioCombineItem &item,
                                            const Sharing &sharing, Sums &sums) {
    const Parts parts(p, item, sharing.rows * p.num_qo_heads, threadIdx.x / 32);
    if (item.count == 0 || item.q_token >= p.num_tokens) return;
    if (parts.by_warp) return combine_by_warps(p, item, parts, sharing);
    for (u32 head = sharing.first; head < p.num_qo_heads; head += sharing.blocks_of_row) {
        const Target target(p, item, head);
        if (head == sharing.first) {
            wait_for_prerequisites();
            allow_dependents();
        }
        combine_head(p, parts, target, sums);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(32 * folio::WARPS, folio::CTAS)
    folio_combine(const __grid_constant__ FolioCombineParams p) {
    using namespace folio;
    __shared__ Sums sums;
    // Where all rows of the graph's largest batch are split, the item does not wait for their number.
    u32 index = blockIdx.x / p.blocks_of_row;
    FolioCombineItem item = p.plan.combines[index];
    const u32 rows = p.plan.counts[FOLIO_COUNT_COMBINES], blocks_of_row = shared_by(p, rows);
    if (blocks_of_row != p.blocks_of_row) {
        index = blockIdx.x / blocks_of_row;
        item = p.plan.combines[index];
    }
    const u32 first = blockIdx.x - index * blocks_of_row;
#pragma unroll 1
    while (index < rows) {
        combine_row(p, item, {rows, first, blocks_of_row}, sums);
        index += gridDim.x / blocks_of_row;
        if (index < rows) item = p.plan.combines[index];
    }
    leave();
}
