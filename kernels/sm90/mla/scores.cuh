// The first warpgroup of the Hopper MLA kernel: scores, softmax, weights. Eight of the nine column tiles of its 64
// queries stay in registers as operands; the rotary one is in shared memory. It hands the weights of a tile on only when
// most of the next tile's scores are computed: the outputs of tile i then run under the softmax of tile i + 1. Without
// that order both products would start together and every softmax would stand alone (benches/gpu/NOTES.md).
#pragma once

#include "sm90/mla/tile.cuh"

namespace folio::mla {

// Steps of 16 columns in the registers, and in all; after how many of them the weights before are handed on.
constexpr int REGISTER_STEPS = RANK / 16, STEPS = (RANK + ROPE) / 16, HAND_ON_AFTER = 30;
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

// Four 8x8 matrices of 16-bit elements from registers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

class Scores {
public:
    __device__ __forceinline__ Scores(const FolioMlaHopperParams &p, Shared &shared)
        : p(p), shared(shared), scale(p.mla.attention.logits_scale * LOG2_E), pending(NONE) {}

    __device__ __forceinline__ void run() {
#pragma unroll 1
        for (Items items(p); items.any(); items.next()) {
            if (!items.holds()) continue;
            attend(items);
        }
    }

private:
    static constexpr u32 NONE = STAGES;

    __device__ __forceinline__ void attend(const Items &items) {
        i32 left;
        {
            const RowTile tile(p, items.index());
            if (tile.num_rows == 0) return;
            load_queries(tile);
            left = tile.num_keys();
        }
        float max[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f};
#pragma unroll 1
        for (; left > 0; left -= KEYS) {
            const bool hides = left < shared.hidden_below;
            mbarrier_wait(shared_address(&shared.filled[turn.stage()]), turn.parity());
            multiply();
            if (hides) hide(left);
            if (left < KEYS) clear_values(left);
            weigh(max, sum);
            const bool last = left <= KEYS;
            if (last) finish_sums(sum);
            advance(last);
        }
        write_lse(max, sum);
    }

    // All rows through shared memory, eight columns of operands at a time: coalesced loads in flight together.
    __device__ __forceinline__ void load_queries(const RowTile &tile) {
        const u32 thread = thread_of_warpgroup(), lane = thread & 31, warp = thread >> 5;
        const FolioAttentionParams &a = p.mla.attention;
        u32 rope[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 thread = thread_of_warpgroup(), row = (thread >> 3) + 16 * i;
            const u32 token = tile.token(p, row);
            const i64 t = static_cast<i64>(tile.q_token) + token, h = tile.head(p, row, token);
            const u16 *const latent =
                static_cast<const u16 *>(a.q.data) + t * a.q.stride_token + h * a.q.stride_head + 8 * (thread & 7);
            const u16 *const rotary = static_cast<const u16 *>(p.mla.q_rope.data) + t * p.mla.q_rope.stride_token +
                                      h * p.mla.q_rope.stride_head + 8 * (thread & 7);
#pragma unroll
            for (int c = 0; c < LATENT_ATOMS + 1; ++c) {
                uint4 x = make_uint4(0, 0, 0, 0);
                const u16 *from = c < LATENT_ATOMS ? latent + 64 * c : rotary;
                if (row < tile.num_rows) x = *reinterpret_cast<const uint4 *>(from);
                u32 *to = c < LATENT_ATOMS ? queries + 16 * c + 4 * i : rope + 4 * i;
                to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
            }
        }
        barrier_sync(1, 128);  // the item before is done with what is written now
        shared.outputs[0] = tile.outputs();
        if (thread < ROWS) {
            const i32 unseen = tile.num_keys() - tile.row_end(p, min(thread, tile.num_rows - 1));
            shared.unseen[thread] = unseen;
            if (thread == 0) shared.hidden_below = unseen + KEYS;
        }
        const u32 base = shared_address(shared.rope_queries);
        const u32 put = base + (thread >> 3) * 128 + (((thread & 7) ^ ((thread >> 3) & 7)) << 4);
        const u32 get = base + (16 * warp + (lane & 15)) * 128;
#pragma unroll
        for (int c = 0; c < LATENT_ATOMS + 1; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 *x = c < LATENT_ATOMS ? queries + 16 * c + 4 * i : rope + 4 * i;
                const u32 four[4] = {x[0], x[1], x[2], x[3]};
                st_shared_v4(put + 2048 * i, four);
            }
            if (c == LATENT_ATOMS) fence_proxy_async();
            barrier_sync(1, 128);
            if (c == LATENT_ATOMS) break;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                u32 operand[4];
                ldmatrix_x4(operand, get + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4));
#pragma unroll
                for (int i = 0; i < 4; ++i) queries[16 * c + 4 * k + i] = operand[i];
            }
            barrier_sync(1, 128);
        }
    }

    // Scores of the stage. Hands on the weights before once most steps are done.
    __device__ __forceinline__ void multiply() {
        const u32 at = shared_address(shared.stages[turn.stage()]);
        const u64 latent = wgmma_descriptor(at, 16, GROUP_BYTES),
                  rotary = wgmma_descriptor(at + ROPE_OFFSET, 16, GROUP_BYTES);
        const u64 rope_queries = wgmma_descriptor(shared_address(shared.rope_queries), 16, ATOM);
        renew(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            // Atoms are 1024 bytes apart, steps of 16 columns in them 32 bytes; descriptors count 16 bytes.
            const u64 within = 2 * (step % 4);
            if (step < REGISTER_STEPS) {
                wgmma_rs<Element>(s, queries + 4 * step, latent + step / 4 * (ATOM / 16) + within, step != 0);
            } else {
                wgmma_ss<Element>(s, rope_queries + within, rotary + within, 1);
            }
            if (step + 1 == HAND_ON_AFTER) wgmma_commit();
        }
        wgmma_commit();
        fence_proxy_async();
        __syncwarp();
        wgmma_wait<1>();
        if (pending != NONE) hand_on(pending);
        pending = NONE;
        wgmma_wait<0>();
        pin(s);
    }

    __device__ __forceinline__ void hand_on(u32 of_stage) {
        if ((thread_of_warpgroup() & 31) == 0) mbarrier_arrive(shared_address(&shared.weighted[of_stage]));
    }

    // Keys that a row does not see.
    __device__ __forceinline__ void hide(i32 left) {
        const u32 thread = thread_of_warpgroup(), row = 16 * (thread >> 5) + (thread & 31) / 4;
        const i32 end0 = left - shared.unseen[row], end1 = left - shared.unseen[row + 8];
#pragma unroll
        for (int i = 0; i < KEYS / 2; ++i) {
            const i32 key = 8 * (i >> 2) + 2 * (thread & 3) + (i & 1);
            if (key >= (i & 2 ? end1 : end0)) s[i] = minus_infinity();
        }
    }

    // Zeros for the values of keys past the last one: 0 x NaN would reach the output. Beyond the last box of 16 tokens
    // there are zeros already.
    __device__ __forceinline__ void clear_values(u32 keys) {
        const u32 end = min((keys + 15) / 16 * 16, static_cast<u32>(KEYS));
        const u32 zeros[4] = {0, 0, 0, 0};
        const u32 at = shared_address(shared.stages[turn.stage()]);
#pragma unroll 1
        for (u32 piece = thread_of_warpgroup(); piece < (end - keys) * (RANK / 8); piece += 128) {
            const u32 token = keys + piece / (RANK / 8), chunk = piece % (RANK / 8);
            st_shared_v4(at + token / 8 * GROUP_BYTES + chunk / 8 * ATOM + token % 8 * 128 + chunk % 8 * 16, zeros);
        }
    }

    // Scores to weights, relative to the running maxima, in place of the stage's rotary atoms.
    __device__ __forceinline__ void weigh(float (&max)[2], float (&sum)[2]) {
        const u32 thread = thread_of_warpgroup(), lane = thread & 31, warp = thread >> 5;
        float largest[2] = {fmaxf(s[0], s[1]), fmaxf(s[2], s[3])};
#pragma unroll
        for (int i = 4; i < KEYS / 2; i += 4) {
            largest[0] = fmaxf(largest[0], fmaxf(s[i], s[i + 1]));
            largest[1] = fmaxf(largest[1], fmaxf(s[i + 2], s[i + 3]));
        }
        StageRows &rows = shared.rows[turn.stage()];
        bool rescale = false;
        if (__any_sync(FULL_WARP, largest[0] * scale > max[0] + SLACK || largest[1] * scale > max[1] + SLACK)) {
            rescale = true;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float larger = fmaxf(max[half], quad_max(largest[half]) * scale);
                const float factor = exp2_approx(max[half] - larger);
                max[half] = larger, sum[half] *= factor;
                if ((lane & 3) == 0) rows.scale[16 * warp + lane / 4 + 8 * half] = factor;
            }
        }
        if (lane == 0) rows.rescale[warp] = rescale;
#pragma unroll
        for (int i = 0; i < KEYS / 2; i += 2) {
            const int half = i >> 1 & 1;
            s[i] = exp2_approx(fmaf(s[i], scale, -max[half]));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], scale, -max[half]));
            sum[half] += s[i] + s[i + 1];
        }
        // The keys 8 g .. 8 g + 7 of all rows are the core matrices of group g: 8 rows x 8 keys each.
        const u32 to = shared_address(shared.stages[turn.stage()]) + ROPE_OFFSET + (lane >> 4) * GROUP_BYTES +
                       (2 * warp + (lane >> 3 & 1)) * 128 + (lane & 7) * 16;
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            stmatrix_x4(to + 2 * k * GROUP_BYTES, Element::pack(s[8 * k], s[8 * k + 1]),
                        Element::pack(s[8 * k + 2], s[8 * k + 3]), Element::pack(s[8 * k + 4], s[8 * k + 5]),
                        Element::pack(s[8 * k + 6], s[8 * k + 7]));
        }
    }

    __device__ __forceinline__ void finish_sums(float (&sum)[2]) {
        const u32 thread = thread_of_warpgroup(), lane = thread & 31, row = 16 * (thread >> 5) + lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] = quad_sum(sum[half]);
            if ((lane & 3) == 0) {
                shared.rows[turn.stage()].inverse[row + 8 * half] = sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
            }
        }
    }

    // To the next stage. The weights of this one wait for its scores, unless there is nothing to wait for yet.
    __device__ __forceinline__ void advance(bool last) {
        const u32 current = turn.stage();
        ++turn.tiles;
        if (last || !mbarrier_test(shared_address(&shared.filled[turn.stage()]), turn.parity())) {
            fence_proxy_async();
            __syncwarp();
            hand_on(current);
        } else {
            pending = current;
        }
    }

    __device__ __forceinline__ void write_lse(const float (&max)[2], const float (&sum)[2]) const {
        const OutputRows rows = shared.outputs[0];
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

    const FolioMlaHopperParams &p;
    Shared &shared;
    const float scale;
    Turn turn;
    u32 pending;  // the stage whose weights are written but not handed on
    u32 queries[4 * REGISTER_STEPS];
    float s[KEYS / 2];
};

}  // namespace folio::mla
