// The first warpgroup: scores, softmax, and the left half of the outputs. The scores of a tile are begun behind the outputs
// of the tile before, so that the tensor unit goes from one to the other without a wait.
#pragma once

#include "sm90/mla/half_outputs.cuh"
#include "sm90/mla/softmax.cuh"
#include "sm90/mla_gather/queries.cuh"

namespace folio::mla {

class Scores {
public:
    __device__ __forceinline__ Scores(const FolioMlaHopperParams &p, Shared &shared) : p(p), shared(shared) {}

    __device__ __forceinline__ void run() {
        for_each_item(p, shared.team, [&](const Items &items) { attend(items); });
    }

private:
    __device__ __forceinline__ void attend(const Items &items) {
        i32 left, hidden_below;
        {
            const RowTile tile(p, shared.team, items.index());
            if (tile.num_rows == 0) return;
            left = tile.num_keys();
            // The first row sees the fewest keys.
            hidden_below = left - tile.row_end(p, 0) + KEYS;
            load_queries(tile);
        }
        RowStates states;
        u32 weights[KEYS / 16][4];
        sums.clear();
        if (left > 0) begin_scores();
        // The last tile stands for itself: where paths with and without scores in flight meet, the compiler waits for them.
#pragma unroll 1
        for (; left > KEYS; left -= KEYS) {
            const u32 stage = turn.stage();
            weigh(states, left, hidden_below);
            hand_on(stage, weights);
            sums.begin_add(shared_address(shared.stages[stage]), weights);
            ++turn.tiles;
            begin_scores();
            wgmma_wait<1>();
            release(stage, weights);
        }
        if (left > 0) {
            const u32 stage = turn.stage();
            weigh(states, left, hidden_below);
            states.finish(shared.rows[stage]);
            hand_on(stage, weights);
            sums.begin_add(shared_address(shared.stages[stage]), weights);
            ++turn.tiles;
            wgmma_wait<0>();
            release(stage, weights);
            sums.rescale(states.factor[0], states.factor[1]);
        }
        sums.store(p, shared.outputs[0]);
        states.write_lse(p, shared.outputs[0]);
    }

    // Weights of the tile whose scores were begun last, and sums relative to the same maxima.
    __device__ __forceinline__ void weigh(RowStates &states, i32 left, i32 hidden_below) {
        wgmma_wait<0>();
        pin(s);
        if (left < hidden_below) RowStates::hide(s, shared.unseen, left);
        if (states.weigh(s, scale, shared.rows[turn.stage()])) sums.rescale(states.factor[0], states.factor[1]);
    }

    // Rows beyond the last are zeros.
    __device__ __forceinline__ void load_queries(const RowTile &tile) {
        const u32 thread = thread_of_warpgroup();
        const FolioAttentionParams &a = p.mla.attention;
        group_sync(1, 128);  // the item before is done with what is written now
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u32 row = (thread >> 3) + 16 * i, chunk = thread & 7, token = tile.token(p, row);
            const i64 t = static_cast<i64>(tile.q_token) + token, h = tile.head(p, row, token);
            const bool exists = row < tile.num_rows;
            const u16 *latent = static_cast<const u16 *>(a.q.data), *rope = static_cast<const u16 *>(p.mla.q_rope.data);
            if (exists) {
                latent += t * a.q.stride_token + h * a.q.stride_head + 8 * chunk;
                rope += t * p.mla.q_rope.stride_token + h * p.mla.q_rope.stride_head + 8 * chunk;
            }
            const u32 to = shared_address(shared.queries) + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
            for (int atom = 0; atom <= LATENT_ATOMS; ++atom) {
                const u16 *const from = atom < LATENT_ATOMS ? latent + 64 * atom : rope;
                cp_async<16>(to + atom * QUERY_ATOM_BYTES, from, exists ? 16 : 0);
            }
        }
        if (thread < ROWS) shared.unseen[thread] = tile.num_keys() - tile.row_end(p, min(thread, tile.num_rows - 1));
        shared.outputs[0] = tile.outputs();
        cp_async_commit();
        cp_async_wait<0>();
        narrow_queries(shared, thread);
        fence_proxy_async();
        group_sync(1, 128);
        const u32 row = 16 * (thread >> 5) + (thread & 31) / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            scale[half] = p.mla.attention.logits_scale * LOG2_E;
            // Above zero, so that times minus infinity it is no NaN.
            if (NARROWS) scale[half] = fmaxf(scale[half] * shared.powers[row + 8 * half], LEAST_SCALE);
        }
    }

    // Of the stage whose turn it is.
    __device__ __forceinline__ void begin_scores() {
        mbarrier_wait(shared_address(&shared.filled[turn.stage()]), turn.parity());
        fence_proxy_async();  // between what the loading warps wrote and wgmma
        const u64 keys = wgmma_descriptor(shared_address(shared.stages[turn.stage()]), 16, GROUP_BYTES),
                  queries = wgmma_descriptor(shared_address(shared.queries), 16, ATOM);
        renew(s);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < (RANK + ROPE) / 16; ++step) {
            // Steps of 16 columns are 32 bytes apart within an atom; descriptors count 16 bytes.
            const u64 within = 2 * (step % 4);
            wgmma_ss<Operand>(s, queries + step / 4 * (QUERY_ATOM_BYTES / 16) + within,
                              keys + step / 4 * (ATOM / 16) + within, step != 0);
        }
        wgmma_commit();
    }

    // Weights, in registers and in the place of the stage's rotary atoms, which no warp reads any more.
    __device__ __forceinline__ void hand_on(u32 stage, u32 (&weights)[KEYS / 16][4]) {
        const u32 at = shared_address(shared.stages[stage]);
        group_sync(1, 128);
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
            pack_weights(s, k, weights[k]);
            store_weights(at, k, weights[k]);
        }
        fence_proxy_async();
        __syncwarp();
        if ((thread_of_warpgroup() & 31) == 0) mbarrier_arrive(shared_address(&shared.weighted[stage]));
    }

    // The left half's products of the stage are complete.
    __device__ __forceinline__ void release(u32 stage, u32 (&weights)[KEYS / 16][4]) {
        sums.pin_sums();
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) pin(weights[k]);
        if ((thread_of_warpgroup() & 31) == 0) mbarrier_arrive(shared_address(&shared.released[stage]));
    }

    const FolioMlaHopperParams &p;
    Shared &shared;
    float scale[2];  // of the lane's rows' logits, in base 2
    Turn turn;
    float s[KEYS / 2];
    HalfOutputs<0, 128> sums;
};

}  // namespace folio::mla
