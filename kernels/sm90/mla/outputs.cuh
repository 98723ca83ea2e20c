// The second and third warpgroup of the Hopper MLA kernel: each sums weights x values for half of the 512 columns, and
// takes part in loading the records.
#pragma once

#include "sm90/mla/tile.cuh"

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

// HALF: 0 or 1. Loader: BoxLoader or Gather.
template <int HALF, class Loader>
class Outputs {
public:
    __device__ __forceinline__ Outputs(const FolioMlaHopperParams &p, Shared &shared, Loader &loader)
        : p(p), shared(shared), loader(loader) {}

    __device__ __forceinline__ void run() {
        loader.template begin<HALF>();
#pragma unroll 1
        for (Items items(p); items.any(); items.next()) {
            if (!items.holds()) continue;
            attend(items);
        }
    }

private:
    __device__ __forceinline__ void attend(const Items &items) {
        i32 left;
        {
            const RowTile tile(p, items.index());
            if (tile.num_rows == 0) return;
            left = tile.num_keys();
            barrier_sync(4 + HALF, 128);  // the item before is stored
            shared.outputs[1 + HALF] = tile.outputs();
        }
        clear();
#pragma unroll 1
        for (; left > 0; left -= KEYS) {
            mbarrier_wait(shared_address(&shared.weighted[turn.stage()]), turn.parity());
            const StageRows &rows = shared.rows[turn.stage()];
            const u32 thread = thread_of_warpgroup(), row = 16 * (thread >> 5) + (thread & 31) / 4;
            if (rows.rescale[thread >> 5]) rescale(rows.scale[row], rows.scale[row + 8]);
            multiply();
            if (left <= KEYS) rescale(rows.inverse[row], rows.inverse[row + 8]);
            loader.template release<HALF>(turn.stage(), turn.parity());
            ++turn.tiles;
        }
        store();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < HALF_COLUMNS / 2; ++i) o[i] = 0.0f;
    }

    __device__ __forceinline__ void rescale(float upper, float lower) {
#pragma unroll
        for (int i = 0; i < HALF_COLUMNS / 2; ++i) o[i] *= i & 2 ? lower : upper;
    }

    __device__ __forceinline__ void multiply() {
        const u32 at = shared_address(shared.stages[turn.stage()]);
        const u64 weights = wgmma_plain_descriptor(at + ROPE_OFFSET, GROUP_BYTES, 128);
        const u64 values = wgmma_descriptor(at + HALF * HALF_COLUMNS / 64 * ATOM, ATOM, GROUP_BYTES);
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            wgmma_ss<Element, Major::DEPTH, Major::WIDTH>(o, weights + k * (2 * GROUP_BYTES / 16),
                                                          values + k * (2 * GROUP_BYTES / 16), 1);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(o);
    }

    __device__ __forceinline__ void store() const {
        const FolioAttentionParams &a = p.mla.attention;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const OutputRows rows = shared.outputs[1 + HALF];
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
                    *reinterpret_cast<float2 *>(to + 8 * j) = make_float2(o[4 * j + 2 * half], o[4 * j + 2 * half + 1]);
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
                    const float *x = o + 16 * j + 4 * t + 2 * half;
                    v[t] = Element::pack(x[0] * a.v_scale, x[1] * a.v_scale);
                }
                transpose_in_quad(v, quad_lane);
                if (exists) *reinterpret_cast<uint4 *>(to + 32 * j) = make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }

    const FolioMlaHopperParams &p;
    Shared &shared;
    Loader &loader;
    Turn turn;
    float o[HALF_COLUMNS / 2];
};

}  // namespace folio::mla
