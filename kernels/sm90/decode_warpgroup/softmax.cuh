// The online softmax of a warpgroup over its steps. Keys are the rows of the scores' accumulators, so a maximum is over all four
// warps. Weights are taken by the old maximum; a vote, in the barrier that the weights need anyway, says whether some logit
// exceeds it by more than RESCALE_THRESHOLD. Only then do the warps agree on another, and take the weights again.
#pragma once

#include "sm90/decode_warpgroup/products.cuh"

namespace folio::decode {

// In shared memory.
struct Statistics {
    float max[CONSUMERS][ROWS], sum[CONSUMERS][ROWS];
};
static_assert(sizeof(Statistics) == STATISTICS_BYTES);

// The larger of the numbers in either half.
__device__ __forceinline__ u32 max_f16x2(u32 a, u32 b) {
    u32 y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

class Softmax {
public:
    float o[BLOCKS][SUMS];

    __device__ __forceinline__ Softmax(const ItemLogits &logits, const RowTable &table, Statistics &statistics,
                                       u32 warp, u32 lane)
        : rule(logits.rule), direct(logits.direct), table(table), statistics(statistics), warp(warp), lane(lane) {
        for_rows([&](int t, int c) {
            max[t][c] = NO_MAX;
            sum[t][c] = 0.0f;
        });
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
            for (int i = 0; i < SUMS; ++i) o[b][i] = 0.0f;
        }
    }

    // Takes the products of a step in, and leaves weights in shared memory; all warps call this together. `token` is the
    // step's first; `edge` says that some row may not see all of the step.
    __device__ __forceinline__ void add_step(float (&s)[STEP_TILES][SUMS], i32 token, bool edge, u32 weights) {
        const i32 first = token + static_cast<i32>(16 * warp + lane / 4);
        if (!direct) finish(s, first);
        if (edge) hide(s, first);
        float more[ROW_TILES][2];
        const bool stale = direct ? weigh<true>(s, more, weights) : weigh<false>(s, more, weights);
        fence_proxy_async();
        if (group_any(CONSUMER_BARRIER, CONSUMER_THREADS, stale)) {
            rescale(s);
            if (direct) {
                weigh<true>(s, more, weights);
            } else {
                weigh<false>(s, more, weights);
            }
            fence_proxy_async();
            group_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
        }
        for_rows([&](int t, int c) { sum[t][c] += more[t][c]; });
    }

    // The sum of a row's weights, and its maximum, after all warps left their parts.
    __device__ __forceinline__ void publish() const {
        for_rows([&](int t, int c) {
            const float all = over_lanes(sum[t][c], [](float a, float b) { return a + b; });
            if (lane >= 4) return;
            statistics.sum[warp][row(t, c)] = all;
            if (warp == 0) statistics.max[0][row(t, c)] = max[t][c];
        });
    }
    __device__ __forceinline__ RowState state(u32 row) const {
        RowState all = {statistics.max[0][row], 0.0f};
#pragma unroll
        for (int w = 0; w < CONSUMERS; ++w) all.sum += statistics.sum[w][row];
        return all;
    }

    // Row 8 t + 2 i + c of lane 4 g + i.
    __device__ __forceinline__ u32 row(int t, int c) const { return 8 * t + 2 * (lane % 4) + c; }

private:
    template <class Use>
    static __device__ __forceinline__ void for_rows(const Use &use) {
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
#pragma unroll
            for (int c = 0; c < 2; ++c) use(t, c);
        }
    }

    // Calls `use` with a row's scores, and the distance of its token from the lane's first.
    template <class Use>
    static __device__ __forceinline__ void for_scores(float (&s)[STEP_TILES][SUMS], int t, int c, const Use &use) {
#pragma unroll
        for (int tile = 0; tile < STEP_TILES; ++tile) {
#pragma unroll
            for (int r = 0; r < 2; ++r) use(s[tile][4 * t + 2 * r + c], 64 * tile + 8 * r);
        }
    }

    // Of the lanes that have the same rows.
    template <class Combine>
    static __device__ __forceinline__ float over_lanes(float x, const Combine &combine) {
#pragma unroll
        for (int lanes = 4; lanes <= 16; lanes *= 2) x = combine(x, __shfl_xor_sync(FULL_WARP, x, lanes));
        return x;
    }

    // Products become logits in base 2. Plain ones stay products, and their scale goes into the exponent.
    __device__ __forceinline__ void finish(float (&s)[STEP_TILES][SUMS], i32 first) const {
        with_rule(rule, [&](const LogitRule &known) {
            for_rows([&](int t, int c) {
                const i32 position = known.alibi ? table.position[row(t, c)] : 0;
                const float scale = table.scale[row(t, c)];
                const float slope = known.alibi ? table.slope[row(t, c)] : 0.0f;
                for_scores(s, t, c, [&](float &x, i32 key) { x = known(x, scale, slope, position - first - key); });
            });
        });
    }

    // Keys that a row does not see get -inf.
    __device__ __forceinline__ void hide(float (&s)[STEP_TILES][SUMS], i32 first) const {
        for_rows([&](int t, int c) {
            const KeyRange seen = table.keys[row(t, c)];
            for_scores(s, t, c, [&](float &x, i32 key) {
                if (!seen.holds(first + key)) x = minus_infinity();
            });
        });
    }

    // Weights by the maxima so far, to shared memory; `more` gets their sums. Whether one is above 2^RESCALE_THRESHOLD.
    template <bool DIRECT>
    __device__ __forceinline__ bool weigh(float (&s)[STEP_TILES][SUMS], float (&more)[ROW_TILES][2],
                                          u32 weights) const {
        // All at once: one by one, each would be waited for.
        float2 scale[ROW_TILES];
        if constexpr (DIRECT) {
#pragma unroll
            for (int t = 0; t < ROW_TILES; ++t) scale[t] = *reinterpret_cast<const float2 *>(table.scale + row(t, 0));
        }
        // Matrix m of a store is tokens 8 r .. and rows 8 t .. for r = m % 2, t = m / 2.
        const u32 target = weights + (2 * warp + lane / 8 % 2) * WEIGHT_KEYS_BYTES + lane / 16 * 128 + lane % 8 * 16;
        // As fp16 pairs, of which two have no order.
        u32 largest[2] = {0, 0};
#pragma unroll
        for (int t = 0; t < ROW_TILES; t += 2) {
#pragma unroll
            for (int tile = 0; tile < STEP_TILES; ++tile) {
                u32 pairs[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const int of = t + m / 2;
                    const float *x = s[tile] + 4 * of + 2 * (m % 2);
                    const float e = exp2_approx(DIRECT ? fmaf(x[0], scale[of].x, -max[of][0]) : x[0] - max[of][0]);
                    const float f = exp2_approx(DIRECT ? fmaf(x[1], scale[of].y, -max[of][1]) : x[1] - max[of][1]);
                    more[of][0] = tile == 0 && m % 2 == 0 ? e : more[of][0] + e;
                    more[of][1] = tile == 0 && m % 2 == 0 ? f : more[of][1] + f;
                    pairs[m] = Math::pack(e, f);
                    largest[m % 2] = max_f16x2(largest[m % 2], pairs[m]);
                }
                stmatrix_x4_trans(target + tile * 8 * WEIGHT_KEYS_BYTES + t * 128, pairs);
            }
        }
        // Weights are not negative, so that their bits have the order of their values.
        constexpr u32 LARGEST = 0x5c00;
        static_assert(RESCALE_THRESHOLD == 8.0f, "LARGEST is 2^8 in fp16");
        const u32 both = max_f16x2(largest[0], largest[1]);
        return (both & 0xffff) > LARGEST || both >> 16 > LARGEST;
    }

    // Agrees on maxima that take in the step's logits, and brings what was accumulated to them.
    __device__ __forceinline__ void rescale(float (&s)[STEP_TILES][SUMS]) {
        for_rows([&](int t, int c) {
            float most = minus_infinity();
            for_scores(s, t, c, [&](float x, i32) { most = fmaxf(most, x); });
            most = over_lanes(most, fmaxf);
            if (lane < 4) statistics.max[warp][row(t, c)] = most;
        });
        group_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
        for_rows([&](int t, int c) {
            float most = minus_infinity();
#pragma unroll
            for (int w = 0; w < CONSUMERS; ++w) most = fmaxf(most, statistics.max[w][row(t, c)]);
            most = fmaxf(max[t][c], direct ? most * table.scale[row(t, c)] : most);
            const float factor = exp2_approx(max[t][c] - most);
            max[t][c] = most;
            sum[t][c] *= factor;
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                o[b][4 * t + c] *= factor;
                o[b][4 * t + 2 + c] *= factor;
            }
        });
    }

    LogitRule rule;
    bool direct;
    float max[ROW_TILES][2], sum[ROW_TILES][2];
    const RowTable &table;
    Statistics &statistics;
    u32 warp, lane;
};

}  // namespace folio::decode
