// The softmax of the Hopper MLA kernels of 64 rows: from the scores of a tile, as a warpgroup's product leaves them, to
// weights in shared memory and in registers. A lane has the rows 16 warp + lane / 4 and the one 8 further, a quad of
// lanes the keys of a row.
#pragma once

#include "ptx/tma_store.cuh"
#include "sm90/mla/rows.cuh"

namespace folio::mla {

// Sums are rescaled only when a maximum grew by more than this, in base 2: weights stay below 2^8.
constexpr float SLACK = 8.0f;
constexpr float LOWEST = -1e30f;

// The lanes of a row in a fragment are a quad.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// A lane's two rows over an item's tiles.
struct RowStates {
    float max[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f};
    float factor[2];  // of what was summed before the last tile, where it says so

    // Minus infinity for keys that a row does not see. `unseen`: how many of the item's last keys each of the 64 rows
    // does not see; `left`: keys of the item from the tile on.
    static __device__ __forceinline__ void hide(float (&s)[KEYS / 2], const i32 *unseen, i32 left) {
        const u32 thread = thread_of_warpgroup(), row = 16 * (thread >> 5) + (thread & 31) / 4;
        const i32 end0 = left - unseen[row], end1 = left - unseen[row + 8];
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            const i32 key = 8 * (i >> 2) + 2 * (thread & 3) + (i & 1);
            if (key >= (i & 2 ? end1 : end0)) s[i] = minus_infinity();
        }
    }

    // Scores to weights, relative to the running maxima. `scale` is that of each row's logits in base 2. What outputs are
    // multiplied by before goes to `rows`. True where that is not 1 for some row of the warp.
    __device__ __forceinline__ bool weigh(float (&s)[KEYS / 2], const float (&scale)[2], StageRows &rows) {
        const u32 thread = thread_of_warpgroup(), lane = thread & 31, warp = thread >> 5;
        float largest[2] = {fmaxf(s[0], s[1]), fmaxf(s[2], s[3])};
#pragma unroll
        for (int i = 4; i < KEYS / 2; i += 4) {
            largest[0] = fmaxf(largest[0], fmaxf(s[i], s[i + 1]));
            largest[1] = fmaxf(largest[1], fmaxf(s[i + 2], s[i + 3]));
        }
        bool rescale = false;
        if (__any_sync(FULL_WARP, largest[0] * scale[0] > max[0] + SLACK || largest[1] * scale[1] > max[1] + SLACK)) {
            rescale = true;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float larger = fmaxf(max[half], quad_max(largest[half]) * scale[half]);
                factor[half] = exp2_approx(max[half] - larger);
                max[half] = larger, sum[half] *= factor[half];
                if ((lane & 3) == 0) rows.scale[16 * warp + lane / 4 + 8 * half] = factor[half];
            }
        }
        if (lane == 0) rows.rescale[warp] = rescale;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 2) {
            const int half = i >> 1 & 1;
            s[i] = exp2_approx(fmaf(s[i], scale[half], -max[half]));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], scale[half], -max[half]));
            sum[half] += s[i] + s[i + 1];
        }
        return rescale;
    }

    // After the last tile: what outputs are multiplied by in the end.
    __device__ __forceinline__ void finish(StageRows &rows) {
        const u32 thread = thread_of_warpgroup(), lane = thread & 31, row = 16 * (thread >> 5) + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] = quad_sum(sum[half]);
            factor[half] = sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
            if ((lane & 3) == 0) rows.inverse[row + 8 * half] = factor[half];
        }
    }

    __device__ __forceinline__ void write_lse(const FolioMlaHopperParams &p, const OutputRows &rows) const {
        const u32 thread = thread_of_warpgroup();
        const FolioAttentionParams &a = p.mla.attention;
        if ((thread & 3) != 0) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 row = 16 * (thread >> 5) + (thread & 31) / 4 + 8 * half;
            if (row >= rows.num_rows) continue;
            const u32 token = rows.token(p, row), head = rows.head(p, row, token);
            const i64 at_token = static_cast<i64>(rows.first_token) + token;
            const float lse = log_sum_exp({max[half], sum[half]});
            if (rows.is_partial) {
                a.plan.partial_lse[at_token * a.num_qo_heads + head] = lse;
            } else if (a.lse) {
                a.lse[at_token * a.lse_stride_token + head * a.lse_stride_head] = lse_in_base(lse, a.flags);
            }
        }
    }
};

// Weights of 16 keys as the wide operand of a product, and as the four matrices that stmatrix writes.
__device__ __forceinline__ void pack_weights(const float (&s)[KEYS / 2], int step, u32 (&packed)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = Operand::pack(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
}

// Weights of 16 keys to a stage, in place of the rotary atoms: the keys 8 g .. 8 g + 7 of all rows are the core matrices
// of group g, 8 rows x 8 keys each.
__device__ __forceinline__ void store_weights(u32 stage, int step, const u32 (&packed)[4]) {
    const u32 thread = thread_of_warpgroup(), lane = thread & 31, warp = thread >> 5;
    const u32 to =
        stage + ROPE_OFFSET + (lane >> 4) * GROUP_BYTES + (2 * warp + (lane >> 3 & 1)) * 128 + (lane & 7) * 16;
    stmatrix_x4(to + 2 * step * GROUP_BYTES, packed);
}

}  // namespace folio::mla
