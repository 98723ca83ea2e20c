// Half of the output's 512 columns for 64 rows, as the Hopper MLA kernels sum it in the registers of a warpgroup: products
// of weights and values, changes of scale, and storing to rows of the output or to partial results.
#pragma once

#include "sm90/mla/rows.cuh"

namespace folio::mla {

constexpr int HALF_COLUMNS = RANK / 2;

// Lanes that differ in bit LANES exchange: the lower one gives y and keeps x, the upper one gives x and keeps y.
template <u32 LANES>
__device__ __forceinline__ void exchange(u32 &x, u32 &y, u32 lane) {
    const bool upper = lane & LANES;
    const u32 other = __shfl_xor_sync(FULL_WARP, upper ? x : y, LANES);
    x = upper ? other : x, y = upper ? y : other;
}

// Lane i of a quad ends with what lanes 0 to 3 had as element i.
__device__ __forceinline__ void transpose_in_quad(u32 (&v)[4], u32 lane) {
    exchange<1>(v[0], v[1], lane);
    exchange<1>(v[2], v[3], lane);
    exchange<2>(v[0], v[2], lane);
    exchange<2>(v[1], v[3], lane);
}

// HALF: 0 or 1. A lane has the rows 16 warp + lane / 4 and the one 8 further. COLUMNS: of one instruction. 256 need more
// registers than a thread of four warpgroups is launched with, so that the compiler refuses them there.
template <int HALF, int COLUMNS = HALF_COLUMNS>
struct HalfOutputs {
    static constexpr int PARTS = HALF_COLUMNS / COLUMNS;

    float o[PARTS][COLUMNS / 2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (float &x : o[part]) x = 0.0f;
        }
    }

    __device__ __forceinline__ void rescale(float upper, float lower) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) o[part][i] *= i & 2 ? lower : upper;
        }
    }

    // While products are in flight they stay where they are.
    __device__ __forceinline__ void pin_sums() {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) pin(o[part]);
    }

    // The values of 16 keys of the stage, and the columns of a part.
    static __device__ __forceinline__ u64 values(u32 stage, int step, int part) {
        const u64 first = wgmma_descriptor(stage + HALF * HALF_COLUMNS / 64 * ATOM, ATOM, GROUP_BYTES);
        return first + step * (2 * GROUP_BYTES / 16) + part * (COLUMNS / 64 * ATOM / 16);
    }

    // Adds a stage's products. Its weights are in shared memory.
    __device__ __forceinline__ void add(u32 stage) {
        const u64 weights = wgmma_plain_descriptor(stage + ROPE_OFFSET, GROUP_BYTES, 128);
        pin_sums();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                wgmma_ss<Operand, Major::DEPTH, Major::WIDTH>(o[part], weights + k * (2 * GROUP_BYTES / 16),
                                                              values(stage, k, part), 1);
            }
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin_sums();
    }

    // Begins to add a stage's products, with its weights in registers. The caller waits.
    __device__ __forceinline__ void begin_add(u32 stage, u32 (&weights)[KEYS / 16][4]) {
        pin_sums();
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) pin(weights[k]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                wgmma_rs<Operand, Major::WIDTH>(o[part], weights[k], values(stage, k, part), 1);
            }
        }
        wgmma_commit();
    }

    // `of_item` is in shared memory: registers are full of sums.
    __device__ __forceinline__ void store(const FolioMlaHopperParams &p, const OutputRows &of_item) const {
        const FolioAttentionParams &a = p.mla.attention;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const OutputRows rows = of_item;
            const u32 thread = thread_of_warpgroup(), quad_lane = thread & 3;
            const u32 row = 16 * (thread >> 5) + (thread & 31) / 4 + 8 * half;
            const u32 token = rows.token(p, row), head = rows.head(p, row, token);
            const bool exists = row < rows.num_rows;
            const i64 at_token = static_cast<i64>(rows.first_token) + token;
            if (rows.is_partial) {
                const i64 at = at_token * a.num_qo_heads + head;
                float *to = a.plan.partial_o + at * RANK + HALF * HALF_COLUMNS + 2 * quad_lane;
                if (!exists) continue;
#pragma unroll
                for (int j = 0; j < HALF_COLUMNS / 8; ++j) {
                    const float *x = sums_of(j, half);
                    *reinterpret_cast<float2 *>(to + 8 * j) = make_float2(x[0], x[1]);
                }
                continue;
            }
            u16 *to = static_cast<u16 *>(a.o.data) + at_token * a.o.stride_token + head * a.o.stride_head +
                      HALF * HALF_COLUMNS + 8 * quad_lane;
#pragma unroll
            for (int j = 0; j < HALF_COLUMNS / 32; ++j) {
                u32 v[4];
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const float *x = sums_of(4 * j + t, half);
                    v[t] = Element::pack(x[0] * a.v_scale, x[1] * a.v_scale);
                }
                transpose_in_quad(v, quad_lane);
                if (exists) *reinterpret_cast<uint4 *>(to + 32 * j) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }

private:
    // Of columns 8 j + 2 (lane % 4) and the next, in the upper or the lower row.
    __device__ __forceinline__ const float *sums_of(int j, int half) const {
        return o[j / (COLUMNS / 8)] + 4 * (j % (COLUMNS / 8)) + 2 * half;
    }
};

}  // namespace folio::mla
