// Prefill attention on Hopper: tiles of Q, K and V are loaded, wgmma multiplies them, one persistent CTA per
// multiprocessor goes through the plan's items. 16-bit q, 16-bit or fp32 o; k and v of q's type or fp8, paged or ragged. TMA
// loads K and V where tensor maps describe them: pages of a multiple of 8 tokens, or ragged. Else they come row by row.
// Causal or full, windows, soft cap, sinks, scales of heads and of requests, log-sum-exp. Custom masks, mm-prefix, causality
// by request and ALiBi are a variant's, which takes registers for them. Others are for runs with a soft cap, or with ALiBi:
// faster.
//
// Rows of up to DIM_QK and DIM_VO columns: the maps end at the problem's.
//
// The kernel table's defines, FOLIO_KV_ROWS: how rows of K and V come, see tile.cuh, FOLIO_ROPE_DIM: the columns of keys
// that come by a map of their own, 0 where keys are whole, FOLIO_AFTER: 1 for runs that go on from earlier keys,
// FOLIO_MASKED: 1 for any masks, and FOLIO_LOGITS: see tile.cuh.
#include "sm90/prefill/before.cuh"
#include "sm90/prefill/biased.cuh"
#include "sm90/prefill/capped.cuh"
#include "sm90/prefill/convert_rows.cuh"
#include "sm90/prefill/copy_rows.cuh"
#include "sm90/prefill/load.cuh"
#include "sm90/prefill/narrow_queries.cuh"
#include "sm90/prefill/output.cuh"
#include "sm90/prefill/step_logits.cuh"
#include "sm90/prefill/step_mask.cuh"

namespace folio::prefill {

using Scores = float[BLOCK / 2];
using Probabilities = u32[BLOCK / 4];
using Output = float[DIM_VO / 2];
using State = StateOf<CAPPED>::Type;

// A consumer warpgroup: 64 packed query rows of every tile. Steps are pipelined within the warpgroup: while
// the tensor cores multiply P V of one step and Q K of the next, the softmax of the next step waits only for the
// latter. Across tiles, the first Q K of a tile overlaps the output of the tile before.
class Consumer {
public:
    __device__ __forceinline__ Consumer(const FolioPrefillParams &params, const u8 *shared_bytes)
        : params(params.attention), head_dim_vo(params.head_dim_vo), shared(shared_address(shared_bytes)) {
        group = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0) - 1;
        tiles = reinterpret_cast<const Tile *>(shared_bytes + TILES);
    }

    __device__ __forceinline__ void run() {
        Scores s;
        Probabilities p;
        Output o;
        const Tile *tile = await_tile();
        if (tile->num_steps == 0) return;
        narrow();
        turn = Turn(*tile, group);
        key.enter(turn);
        value.enter(turn);
        Before before;
        before.read(params, *tile);
        await_keys();
        see_rows();
        start_scores(s);
        while (true) {
            State rows;
            TileSteps steps(params, *tile, group, power);
            StepMask::begin(params, *tile, shared, steps.scale);
            before.begin(rows, steps.scale);
            before.leave(params, *tile);
            first_step(*tile, steps, before, s, p, o, rows);
            do {
#pragma unroll 1
                while (!steps.idle && steps.advance()) next_step(*tile, steps, s, p, o, rows);
            } while (AFTER && leaves_context_end(*tile, steps));
#pragma unroll 1
            while (steps.idle && steps.advance()) idle_step(steps);

            await_values();
            see_rows();
            start_output(p, o);
            key.leave(turn);
            query.advance();
            slot.advance();
            const Tile *next = await_tile();
            const bool more = next->num_steps != 0;
            if (more) {
                before.read(params, *next);
                narrow();
                const Turn first(*next, group);
                key.enter(first);
                key.await(first, shared + KEY_FULL);
                see_rows();
            }
            // Also without a next tile, when the buffers hold old data and the result is not used: a wgmma in a
            // branch would serialise the pipeline.
            start_scores(s);
            wgmma_wait<1>();
            pin(o);
            value.release(turn, shared + VALUE_EMPTY);
            value.leave(turn);
            store_output(params, head_dim_vo, *tile, o, rows);
            if (!more) break;
            tile = next;
            turn = Turn(*tile, group);
            value.enter(turn);
        }
        wgmma_wait<0>();
        pin(s);
    }

private:
    // Where the warpgroup is in a tile.
    struct TileSteps {
        int block, last_block;
        int context_stop;  // with a context: the loop of steps is left behind this block
        MaskedBlocks masked;
        bool idle;        // the item ends before the warpgroup's rows
        bool transforms;  // scores, before exponents are taken
        // Of the thread's rows: what exponents multiply scores by, and what queries were divided by.
        float scale[2], power[2];
        CapSeries<NearTanh> series;  // where all runs have a cap
        Slopes slopes;               // where all have a bias

        __device__ __forceinline__ TileSteps(const FolioAttentionParams &params, const Tile &tile, u32 group,
                                             const float (&power)[2])
            : block(tile.first_block), last_block(block - tile.num_steps + 1), power{power[0], power[1]} {
            const StepLogits logits(params, tile);
            transforms = logits.transforms;
            if constexpr (CAPPED) series = CapSeries<NearTanh>(params, tile);
            if constexpr (BIASED) slopes = Slopes(params, tile, logits.exponent);
#pragma unroll
            for (int r = 0; r < 2; ++r) scale[r] = logits.exponent * (CONVERTS && !transforms ? power[r] : 1.0f);
            const int positions = tile.group_positions(), before = OWN_KEYS ? 0 : group * positions;
            const int first = tile.position + before;
            const int last = tile.position + min(before + positions, static_cast<int>(tile.num_tokens)) - 1;
            idle = before >= static_cast<int>(tile.num_tokens);
            masked = MaskedBlocks(tile.all(params, first, last, tile.kv_end), tile);
            if constexpr (AFTER) {
                if (idle) masked.context = {};
                const int end = masked.context.block();
                context_stop = end >= last_block && end < block ? end : last_block;
            }
        }

        __device__ __forceinline__ bool advance() { return --block >= (AFTER ? context_stop : last_block); }
        __device__ __forceinline__ bool last() const { return block == last_block; }
    };

    __device__ __forceinline__ const Tile *await_tile() const {
        mbarrier_wait(shared + QUERY_FULL + 8 * (query.index * CONSUMERS + group), query.parity);
        return tiles + slot.index() * TILE_RECORDS + (OWN_KEYS ? group : 0);
    }

    // The queries that were awaited, to the type of keys, where they are of another.
    __device__ __forceinline__ void narrow() {
        if (CONVERTS && params.flags & FOLIO_QUERIES_BF16) {
            narrow_queries(shared + QUERIES + (query.index * CONSUMERS + group) * QUERY_BYTES, power);
            asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(WARPGROUP) : "memory");
        }
    }

    __device__ __forceinline__ void await_keys() const { key.await(turn, shared + KEY_FULL); }
    __device__ __forceinline__ void await_values() const { value.await(turn, shared + VALUE_FULL); }

    // What cp.async or stores wrote, to wgmma, which reads by the asynchronous proxy. Who loads does not fence: that would
    // wait for all copies that are under way.
    __device__ __forceinline__ void see_rows() const {
        if constexpr (!BY_BOXES) fence_proxy_async();
    }

    // S = Q K of the step in `key`.
    __device__ __forceinline__ void start_scores(Scores &s) const {
        u32 queries = shared + QUERIES + (query.index * CONSUMERS + group) * QUERY_BYTES;
        // Computed anew, where registers do not suffice for what is the same for all tiles.
        if constexpr (MASKED || (HAS_SERIES && DIM_QK > 128) || (CONVERTS && QUERY_STAGES == 1))
            asm volatile("" : "+r"(queries));
        const u64 q = wgmma_descriptor(queries, 16, ATOM_BYTES);
        const u32 keys = shared + KEYS + key.index * KEY_BYTES;
        const u64 nope = wgmma_descriptor(keys, 16, KEY_GROUP_STRIDE);
        const u64 rope = wgmma_descriptor(keys + ROPE_KEYS, 16, ATOM_BYTES);
        renew(s);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < DIM_QK / 16; ++i) {
            const int block = i / 4, within = i % 4 * 32;
            const u64 k = block < column_blocks(DIM_NOPE) ? nope + block * KEY_COLUMN_STRIDE / 16 : rope;
            wgmma_ss<Element>(s, q + (block * QUERY_COLUMN_STRIDE + within) / 16, k + within / 16, i != 0);
        }
        wgmma_commit();
    }

    // O += P V of the step in `value`.
    __device__ __forceinline__ void start_output(Probabilities &p, Output &o) const {
        const u64 v =
            wgmma_descriptor(shared + VALUES + value.index * VALUE_BYTES, VALUE_COLUMN_STRIDE, VALUE_GROUP_STRIDE);
        pin(o);
        pin(p);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK / 16; ++i) {
            wgmma_rs<Element, Major::WIDTH>(o, p + 4 * i, v + i * (2 * VALUE_GROUP_STRIDE / 16), 1);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void release_scores(const TileSteps &steps) const {
        key.release(turn, shared + KEY_EMPTY);
        // Every thread arrives, because this also says that the thread has read the record of the tile before.
        if (steps.last()) mbarrier_arrive(shared + QUERY_EMPTY + 8 * (query.index * CONSUMERS + group));
    }

    // Scores become probabilities. True if the output must be multiplied by `factor`.
    __device__ __forceinline__ bool finish_scores(const Tile &tile, const TileSteps &steps, const StepMask &mask,
                                                  Scores &s, CappedRows &rows, float (&)[2]) const {
        release_scores(steps);
        const bool hides = steps.masked.right(steps.block) || steps.masked.left(steps.block);
        rows.add(s, steps.series, params, tile, hides,
                 [&](Scores &s) { mask.apply(s, params, tile, shared, steps.masked, steps.block); });
        return false;
    }

    __device__ __forceinline__ bool finish_scores(const Tile &tile, const TileSteps &steps, const StepMask &mask,
                                                  Scores &s, Rows &rows, float (&factor)[2]) const {
        release_scores(steps);
        if (steps.transforms) {
            if constexpr (CONVERTS) {
#pragma unroll
                for (int i = 0; i < BLOCK / 2; ++i) s[i] *= steps.power[i / 2 % 2];
            }
            StepLogits::transform(s, steps.scale[0], params, tile);
        }
        mask.apply(s, params, tile, shared, steps.masked, steps.block);
        float of_block[2] = {};
        if constexpr (BIASED) steps.slopes.add(s, of_block, tile, steps.block);
        return rows.update(s, steps.scale, of_block, factor);
    }

    __device__ __forceinline__ void first_step(const Tile &tile, const TileSteps &steps, const Before &before,
                                               Scores &s, Probabilities &p, Output &o, State &rows) {
        StepMask mask;
        mask.prepare(params, tile, shared, steps.masked, steps.block);
        wgmma_wait<0>();
        pin(s);
        // Not earlier: accumulators that are written while products are under way serialise these.
        if constexpr (AFTER) before.load(o, params, head_dim_vo, tile);
        float factor[2];
        const bool rescales = finish_scores(tile, steps, mask, s, rows, factor);
        pack_probabilities(p, s);
        clear_stale_values(tile, tile.first_block);
        if constexpr (!AFTER) {
#pragma unroll
            for (int i = 0; i < DIM_VO / 2; ++i) o[i] = 0.0f;
        } else if (rescales) {
            multiply(o, factor);
        }
    }

    __device__ __forceinline__ void next_step(const Tile &tile, const TileSteps &steps, Scores &s, Probabilities &p,
                                              Output &o, State &rows) {
        key.advance(turn);
        await_keys();
        if constexpr (!BY_BOXES) {
            // V of the step before was requested earlier: one fence for both.
            await_values();
            see_rows();
        }
        start_scores(s);
        await_values();
        start_output(p, o);
        StepMask mask;
        mask.prepare(params, tile, shared, steps.masked, steps.block);
        wgmma_wait<1>();
        pin(s);
        float factor[2];
        const bool rescales = finish_scores(tile, steps, mask, s, rows, factor);
        keep_before_wait(rows);
        wgmma_wait<0>();
        pin(o);
        pin(p);
        value.release(turn, shared + VALUE_EMPTY);
        value.advance(turn);
        pack_probabilities(p, s);
        if (rescales) multiply(o, factor);
    }

    static __device__ __forceinline__ void multiply(Output &o, const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < DIM_VO / 2; ++i) o[i] *= factor[i / 2 % 2];
    }

    // Whether the loop was left behind the block in which a context ends, and is to be entered again. What is done for that
    // block stays out of the loop, whose instructions are many.
    __device__ __forceinline__ bool leaves_context_end(const Tile &tile, TileSteps &steps) const {
        if (!steps.masked.end_context(steps.context_stop)) return false;
        clear_stale_values(tile, steps.context_stop);
        steps.block = steps.context_stop;
        steps.context_stop = steps.last_block;
        steps.masked.context = {};
        return true;
    }

    // A warpgroup without rows releases the buffers unread, and leaves the tensor cores to the others.
    __device__ __forceinline__ void idle_step(const TileSteps &steps) {
        key.advance(turn);
        await_keys();
        release_scores(steps);
        await_values();
        value.release(turn, shared + VALUE_EMPTY);
        value.advance(turn);
    }

    // ptxas would move the wait for P V up to the wait for Q K, above all exponentials. A store that depends on them
    // keeps it below; the store never happens, because a sum of exponentials is not negative.
    __device__ __forceinline__ void keep_before_wait(const State &rows) const {
        if (rows.sum[0] + rows.sum[1] < 0.0f) {
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(shared), "f"(rows.sum[1]) : "memory");
        }
    }

    // Rows of V past the last key, or the last of a context, have weight 0, but 0 * NaN is NaN, so each warpgroup clears them
    // before its products; that several clear the same rows does no harm. Boxes past the last key are zeros already. Of rows
    // that are converted `box_tokens` says nothing: where they came by boxes, all behind the last key are cleared.
    __device__ __forceinline__ void clear_stale_values(const Tile &tile, int block) const {
        constexpr int ROW_PIECES = VALUE_COLUMN_BLOCKS * 8;
        const int box = box_tokens(params), first_key = block * BLOCK;
        const int begin = tile.end_in(block, tile.kv_end) - first_key;
        const bool to_end = KV_ROWS == KvRows::RAGGED || (CONVERTS && prefill_of(params).raw_box_tokens != 0);
        const int end = to_end ? BLOCK : min(BLOCK, (tile.kv_end + box - 1) / box * box - first_key);
        if (begin >= end || !turn.has_keys()) return;
        await_values();
        const u32 buffer = shared + VALUES + value.index * VALUE_BYTES;
        for (int i = begin * ROW_PIECES + threadIdx.x % WARPGROUP; i < end * ROW_PIECES; i += WARPGROUP) {
            const int row = i / ROW_PIECES, piece = i % ROW_PIECES;
            asm volatile(
                "st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(buffer + row / 8 * VALUE_GROUP_STRIDE + row % 8 * 128 +
                                                                 piece / 8 * VALUE_COLUMN_STRIDE + piece % 8 * 16),
                "r"(0)
                : "memory");
        }
        fence_proxy_async();
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(WARPGROUP) : "memory");
    }

    const FolioAttentionParams &params;
    const u32 &head_dim_vo;
    u32 shared, group;
    SlotRing slot;
    const Tile *tiles;
    Ring<QUERY_STAGES> query;
    StageRing<OWN_KEYS> key, value;
    Turn turn;
    float power[2] = {1.0f, 1.0f};  // what the queries of the thread's rows were divided by
};

// `raw_arrivals`: how often it is said that rows to convert have come.
__device__ __forceinline__ void init_barriers(u32 shared, u32 raw_arrivals) {
    constexpr u32 WARPS = 4;
    for (int i = 0; i < QUERY_STAGES * CONSUMERS; ++i) {
        mbarrier_init(shared + QUERY_FULL + 8 * i, 1);
        mbarrier_init(shared + QUERY_EMPTY + 8 * i, WARPGROUP);
    }
    for (int i = 0; i < STAGES * FULL_BARRIERS; ++i) {
        mbarrier_init(shared + KEY_FULL + 8 * i, FULL_ARRIVALS);
        mbarrier_init(shared + VALUE_FULL + 8 * i, FULL_ARRIVALS);
    }
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(shared + KEY_EMPTY + 8 * i, WARPS * CONSUMERS);
        mbarrier_init(shared + VALUE_EMPTY + 8 * i, WARPS * CONSUMERS);
    }
    for (u32 i = 0; i != RAW_STAGES; ++i) {
        mbarrier_init(shared + RAW_FULL + 8 * i, raw_arrivals);
        mbarrier_init(shared + RAW_EMPTY + 8 * i, 1);
    }
    for (int i = 0; i < TILE_SLOTS; ++i) {
        mbarrier_init(shared + TILE_FULL + 8 * i, 1);
        mbarrier_init(shared + TILE_READ + 8 * i, LOADING_WARPS);
    }
    mbarrier_init(shared + TILE_ENDS, 1);
    mbarrier_init_fence();
}

// `k_rope` is not used where keys are whole, and maps of K and V are not where rows come one by one. `context`: where AFTER.
__device__ __forceinline__ void attend(const FolioPrefillParams &params, const TensorMap &q_map, const KeyMaps &maps,
                                       const KeyMaps &context) {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    const u32 shared = shared_address(shared_bytes);
    if (threadIdx.x == 0) init_barriers(shared, params.raw_box_tokens != 0 ? 1 : 32);
    if (threadIdx.x == 32) tensor_map_prefetch(&q_map);
    if (threadIdx.x == 64) tensor_map_prefetch(maps.k);
    if (ROPE_DIM > 0 && threadIdx.x == 65) tensor_map_prefetch(maps.k_rope);
    if (threadIdx.x == 96) tensor_map_prefetch(maps.v);
    __syncthreads();
    wait_for_prerequisites();
    // The launch bound gives 384 threads 168 registers each, and 512 threads 128: 3 * 168 = 40 + 2 * 232 = 56 + 2 * 224
    // = 72 + 2 * 216 and 4 * 128 = 32 + 3 * 160 = 56 + 3 * 152. Those who load rows need some, those who convert them and those
    // who find out what any mask shows need more: what outputs, scores and probabilities leave.
    constexpr int ACCUMULATORS = DIM_VO / 2 + BLOCK / 2 + BLOCK / 4;
    constexpr bool SHIFTED =
        OWN_KEYS || (MASKED ? ACCUMULATORS <= 112 || CONSUMERS != 3 : !BY_BOXES && ACCUMULATORS <= 124);
    // One consumer warpgroup has what the producer leaves of 2 * 80 or of 2 * 128, by the CTAs of a multiprocessor.
    constexpr int ALL_REGISTERS = CONSUMERS == 3 ? 512 : CONSUMERS == 2 ? 504 : CTAS == 2 ? 256 : 160;
    constexpr int PRODUCER_REGISTERS = CTAS == 3                   ? (MASKED || !BY_BOXES ? 40 : 32)
                                       : CONVERTS && CONSUMERS < 3 ? 72
                                       : SHIFTED                   ? 56
                                       : CONSUMERS < 3             ? 40
                                                                   : 32;
    constexpr int CONSUMER_REGISTERS = (ALL_REGISTERS - PRODUCER_REGISTERS) / CONSUMERS;
    if (threadIdx.x < WARPGROUP) {
        registers_shrink<PRODUCER_REGISTERS>();
        if constexpr (KV_ROWS != KvRows::ROWS) {
            produce(params, &q_map, maps, context, shared_bytes);
        } else if constexpr (CONVERTS) {
            produce_rows<RowConverter<FOLIO_KV>>(params, &q_map, maps, shared_bytes);
        } else {
            produce_rows<RowCopier<Stored>>(params, &q_map, maps, shared_bytes);
        }
    } else {
        registers_grow<CONSUMER_REGISTERS>();
        Consumer(params, shared_bytes).run();
        // Not earlier: waiting CTAs of the next grid on idle multiprocessors slow this one down.
        allow_dependents();
    }
}

}  // namespace folio::prefill

// Grid: any number of CTAs for which the plan's list has room, FOLIO_THREADS each.
#if FOLIO_KV_ROWS == 2
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::prefill::CTAS)
    folio_prefill_sm90_rows(const __grid_constant__ FolioPrefillParams params,
                            const __grid_constant__ folio::TensorMap q_map,
                            const __grid_constant__ folio::TensorMap k_map,
                            const __grid_constant__ folio::TensorMap v_map) {
    folio::prefill::attend(params, q_map, {&k_map, &k_map, &v_map}, {});
}
#elif FOLIO_ROPE_DIM > 0 && !FOLIO_AFTER
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_prefill_sm90_split_keys(const __grid_constant__ FolioPrefillParams params,
                                  const __grid_constant__ folio::TensorMap q_map,
                                  const __grid_constant__ folio::TensorMap k_map,
                                  const __grid_constant__ folio::TensorMap v_map,
                                  const __grid_constant__ folio::TensorMap k_rope_map) {
    folio::prefill::attend(params, q_map, {&k_map, &k_rope_map, &v_map}, {});
}
#elif FOLIO_ROPE_DIM > 0
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1) folio_prefill_sm90_split_keys_after(
    const __grid_constant__ FolioPrefillParams params, const __grid_constant__ folio::TensorMap q_map,
    const __grid_constant__ folio::TensorMap k_map, const __grid_constant__ folio::TensorMap v_map,
    const __grid_constant__ folio::TensorMap k_rope_map, const __grid_constant__ folio::TensorMap context_k_map,
    const __grid_constant__ folio::TensorMap context_v_map,
    const __grid_constant__ folio::TensorMap context_k_rope_map) {
    folio::prefill::attend(params, q_map, {&k_map, &k_rope_map, &v_map},
                           {&context_k_map, &context_k_rope_map, &context_v_map});
}
#elif FOLIO_MASKED
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::prefill::CTAS)
    folio_prefill_sm90_masked(const __grid_constant__ FolioPrefillParams params,
                              const __grid_constant__ folio::TensorMap q_map,
                              const __grid_constant__ folio::TensorMap k_map,
                              const __grid_constant__ folio::TensorMap v_map) {
    folio::prefill::attend(params, q_map, {&k_map, &k_map, &v_map}, {});
}
#elif FOLIO_LOGITS == 1
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_prefill_sm90_capped(const __grid_constant__ FolioPrefillParams params,
                              const __grid_constant__ folio::TensorMap q_map,
                              const __grid_constant__ folio::TensorMap k_map,
                              const __grid_constant__ folio::TensorMap v_map) {
    folio::prefill::attend(params, q_map, {&k_map, &k_map, &v_map}, {});
}
#elif FOLIO_LOGITS == 2
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_prefill_sm90_biased(const __grid_constant__ FolioPrefillParams params,
                              const __grid_constant__ folio::TensorMap q_map,
                              const __grid_constant__ folio::TensorMap k_map,
                              const __grid_constant__ folio::TensorMap v_map) {
    folio::prefill::attend(params, q_map, {&k_map, &k_map, &v_map}, {});
}
#else
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::prefill::CTAS)
    folio_prefill_sm90(const __grid_constant__ FolioPrefillParams params,
                       const __grid_constant__ folio::TensorMap q_map, const __grid_constant__ folio::TensorMap k_map,
                       const __grid_constant__ folio::TensorMap v_map) {
    folio::prefill::attend(params, q_map, {&k_map, &k_map, &v_map}, {});
}
#endif
