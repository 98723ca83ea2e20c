// The first warpgroup of the Hopper MLA kernels of three: scores, softmax, weights. Most of the nine column tiles of its 64
// queries stay in registers as operands; the last ones are in shared memory. It hands the weights of a tile on only when
// most of the next tile's scores are computed: the outputs of tile i then run under the softmax of tile i + 1. Without
// that order both products would start together and every softmax would stand alone (benches/gpu/NOTES.md).
#pragma once

#include "sm90/mla/softmax.cuh"
#include "sm90/mla/tile.cuh"

namespace folio::mla {

// Steps of 16 columns in the registers, and in all; after how many of them the weights before are handed on.
constexpr int REGISTER_STEPS = 4 * REGISTER_ATOMS, STEPS = (RANK + ROPE) / 16, HAND_ON_AFTER = KEYS == 48 ? 30 : 34;

// Loader: what brings the records, by whose `fence` they are seen by products.
template <class Loader>
class Scores {
public:
    __device__ __forceinline__ Scores(const FolioMlaHopperParams &p, Shared &shared)
        : p(p), shared(shared), scale(p.mla.attention.logits_scale * LOG2_E), pending(NONE) {}

    __device__ __forceinline__ void run() {
        for_each_item(p, shared.team, [&](const Items &items) { attend(items); });
    }

private:
    static constexpr u32 NONE = STAGES;

    __device__ __forceinline__ void attend(const Items &items) {
        i32 left;
        {
            const RowTile tile(p, shared.team, items.index());
            if (tile.num_rows == 0) return;
            load_queries(tile);
            left = tile.num_keys();
        }
        RowStates states;
#pragma unroll 1
        for (; left > 0; left -= KEYS) {
            const bool hides = left < shared.hidden_below;
            mbarrier_wait(shared_address(&shared.filled[turn.stage()]), turn.parity());
            Loader::fence();
            multiply();
            if (hides) RowStates::hide(s, shared.unseen, left);
            if (left < KEYS) clear_values(left);
            weigh(states);
            const bool last = left <= KEYS;
            if (last) states.finish(shared.rows[turn.stage()]);
            advance(last);
        }
        states.write_lse(p, shared.outputs[0]);
    }

    // All rows through shared memory, eight columns of operands at a time: coalesced loads in flight together.
    __device__ __forceinline__ void load_queries(const RowTile &tile) {
        const u32 thread = thread_of_warpgroup(), lane = thread & 31, warp = thread >> 5;
        const FolioAttentionParams &a = p.mla.attention;
        u32 rest[16 * SHARED_ATOMS];
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
                u32 *to = c < REGISTER_ATOMS ? queries + 16 * c + 4 * i : rest + 16 * (c - REGISTER_ATOMS) + 4 * i;
                to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
            }
        }
        group_sync(1, 128);  // the item before is done with what is written now
        shared.outputs[0] = tile.outputs();
        if (thread < ROWS) {
            const i32 unseen = tile.num_keys() - tile.row_end(p, min(thread, tile.num_rows - 1));
            shared.unseen[thread] = unseen;
            if (thread == 0) shared.hidden_below = unseen + KEYS;
        }
        const u32 base = shared_address(shared.queries);
        const u32 put = base + (thread >> 3) * 128 + (((thread & 7) ^ ((thread >> 3) & 7)) << 4);
        const u32 get = base + (16 * warp + (lane & 15)) * 128;
#pragma unroll
        for (int c = 0; c < REGISTER_ATOMS; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 *x = queries + 16 * c + 4 * i;
                const u32 four[4] = {x[0], x[1], x[2], x[3]};
                st_shared_v4(put + 2048 * i, four);
            }
            group_sync(1, 128);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                u32 operand[4];
                ldmatrix_x4(operand, get + (((2 * k + (lane >> 4)) ^ (lane & 7)) << 4));
#pragma unroll
                for (int i = 0; i < 4; ++i) queries[16 * c + 4 * k + i] = operand[i];
            }
            group_sync(1, 128);
        }
#pragma unroll
        for (int i = 0; i < 4 * SHARED_ATOMS; ++i) {
            const u32 four[4] = {rest[4 * i], rest[4 * i + 1], rest[4 * i + 2], rest[4 * i + 3]};
            st_shared_v4(put + 2048 * i, four);
        }
        fence_proxy_async();
        group_sync(1, 128);
    }

    // Scores of the stage. Hands on the weights before once most steps are done.
    __device__ __forceinline__ void multiply() {
        const u32 at = shared_address(shared.stages[turn.stage()]);
        const u64 keys = wgmma_descriptor(at, 16, GROUP_BYTES),
                  rest = wgmma_descriptor(shared_address(shared.queries), 16, ATOM);
        renew(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            // Atoms are 1024 bytes apart, steps of 16 columns in them 32 bytes; descriptors count 16 bytes.
            const u64 within = 2 * (step % 4), of_keys = keys + step / 4 * (ATOM / 16) + within;
            if (step < REGISTER_STEPS) {
                wgmma_rs<Element>(s, queries + 4 * step, of_keys, step != 0);
            } else {
                wgmma_ss<Element>(s, rest + (step - REGISTER_STEPS) / 4 * (QUERY_ATOM_BYTES / 16) + within, of_keys, 1);
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

    // Scores to weights, in place of the stage's rotary atoms.
    __device__ __forceinline__ void weigh(RowStates &states) {
        states.weigh(s, {scale, scale}, shared.rows[turn.stage()]);
        const u32 stage = shared_address(shared.stages[turn.stage()]);
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            u32 packed[4];
            pack_weights(s, step, packed);
            store_weights(stage, step, packed);
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

    const FolioMlaHopperParams &p;
    Shared &shared;
    const float scale;
    Turn turn;
    u32 pending;  // the stage whose weights are written but not handed on
    u32 queries[4 * REGISTER_STEPS];
    float s[KEYS / 2];
};

}  // namespace folio::mla
