// Prefill attention on Hopper with queries, keys, probabilities and values in e4m3: wgmma multiplies them at twice the
// rate of 16 bits. Only for handles that permit probabilities in e4m3. Caches by boxes, where pages are multiples of 8
// tokens, or row by row; head_dims up to 64, 128 and 256, any type of output. Causal or full, windows, soft cap, sinks,
// scales of heads and of requests, log-sum-exp. Custom masks, mm-prefix and ALiBi are other kernels'.
//
// Four warpgroups, one CTA per multiprocessor, persistent: a warp loads queries and keys, two to four load values and
// transpose them, and three warpgroups of 64 query rows each consume, at head_dim 256 two.
// docs/kernels/sm90_prefill_fp8.md says why so.
//
// The sums of wgmma in e4m3 lose small addends, more the longer a sum is: stretches.cuh breaks them off. Row sums of P go
// the same way, by a row of ones, and lose alike: most of what is left cancels.
#include "sm90/prefill_fp8/load.cuh"
#include "sm90/prefill_fp8/stretches.cuh"
#include "sm90/prefill_fp8/transpose.cuh"

namespace folio::prefill_fp8 {

// A consumer warpgroup: 64 packed query rows of every tile. While the matrix unit multiplies P V of one step and Q K of
// the next, the softmax of the next waits only for the latter. Across tiles, the first Q K of a tile overlaps the output
// of the tile before.
class Consumer {
public:
    __device__ __forceinline__ Consumer(const FolioPrefillFp8Params &params, u32 shared)
        : all(params), params(params.attention), shared(shared) {
        group = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0) - PRODUCERS;
        warp_row = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0) * 16 - PRODUCERS * GROUP_ROWS;
    }

    __device__ __forceinline__ void run() {
        Scores s;
        Probabilities p;
        Output o;
        const Tile *tile = await_tile();
        if (tile->num_steps == 0) return;
        TileSteps steps(params, *tile, group);
        await_operands();
        start_scores(s);
        while (true) {
            Rows rows;
            Stretches stretches(warp_sums(), group);
            int continues = 0;  // o holds sums
            first_step(*tile, steps, s, p, rows);
            look_ahead();
#pragma unroll 1
            while (!steps.idle && steps.advance()) next_step(*tile, steps, s, p, o, rows, stretches, continues);
#pragma unroll 1
            while (steps.idle && steps.advance()) idle_step();
            release(shared + QUERY_EMPTY + 8 * query.index());

            mbarrier_wait(shared + VALUE_FULL + 8 * value.index(), value.parity());
            see_rows();
            start_output(p, o, continues);
            const Destination destination(all, *tile);
            key.advance();
            query.advance();
            const u32 read = shared + TILE_READ + 8 * slot.index();
            slot.advance();
            const Tile *next = await_tile();
            const bool more = next->num_steps != 0;
            steps = TileSteps(params, *next, group);
            if (more) await_operands();
            wgmma_wait<0>();
            pin(o);
            release(shared + VALUE_EMPTY + 8 * value.index());
            value.advance();
            stretches.finish(o);
            // Also without a next tile, when the buffers hold old data and the result is not used: a wgmma in a
            // branch would serialise the pipeline.
            start_scores(s);
            store_output(all, *tile, o, rows, destination);
            __syncwarp();
            release(read);
            if (!more) break;
            tile = next;
        }
        wgmma_wait<0>();
        pin(s);
    }

private:
    // Where the warpgroup is in a tile. Blocks from `mask_from` and below `mask_below` hold keys that some of its rows
    // must not see.
    struct TileSteps {
        int block, last_block, mask_from, mask_below;
        int plain_from;  // from there to mask_from scores are as they are
        bool idle;       // the item ends before the warpgroup's rows
        FoldedLogits logits;

        __device__ __forceinline__ TileSteps(const FolioAttentionParams &params, const Tile &tile, u32 group)
            : block(tile.first_block),
              last_block(block - tile.num_steps + 1),
              logits(params, tile.kv_head, tile.request) {
            const Window<i32> window(params);
            const int positions = GROUP_ROWS >> tile.pack_shift, before = group * positions;
            const int first = tile.position + before;
            const int last = tile.position + min(before + positions, static_cast<int>(tile.num_tokens)) - 1;
            idle = before >= static_cast<int>(tile.num_tokens);
            mask_from = max(min(tile.kv_end, window.end(first)), 0) / BLOCK;
            mask_below = (max(window.begin(last), 0) + BLOCK - 1) / BLOCK;
            plain_from = transformed() ? mask_from : mask_below;
        }

        __device__ __forceinline__ bool advance() { return --block >= last_block; }
        __device__ __forceinline__ bool masked_right() const { return block >= mask_from; }
        __device__ __forceinline__ bool masked_left() const { return block < mask_below; }
        __device__ __forceinline__ bool is_plain() const { return block >= plain_from && block < mask_from; }
        __device__ __forceinline__ bool transformed() const { return logits.exponent == 1.0f; }
    };

    __device__ __forceinline__ const Tile *await_tile() const {
        mbarrier_wait(shared + TILE_FULL + 8 * slot.index(), slot.parity());
        return shared_tiles() + slot.index();
    }

    // For sums of the warp's rows.
    __device__ __forceinline__ u32 warp_sums() const {
        return shared + SUMS + (threadIdx.x - PRODUCERS * WARPGROUP) / 32 * WARP_SUM_BYTES;
    }

    // Queries and the first keys of a tile.
    __device__ __forceinline__ void await_operands() const {
        mbarrier_wait(shared + QUERY_FULL + 8 * query.index(), query.parity());
        mbarrier_wait(shared + KEY_FULL + 8 * key.index(), key.parity());
        see_rows();
    }

    // What cp.async and stores wrote, to wgmma, which reads by the asynchronous proxy. Who copies rows does not fence: that
    // would wait for all copies that are under way.
    static __device__ __forceinline__ void see_rows() {
        if constexpr (GATHERED) fence_proxy_async();
    }

    // As mbarrier_wait, unless the barrier was `passed` when it was looked at.
    static __device__ __forceinline__ void await_unless(u32 passed, u32 barrier, u32 parity) {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "setp.ne.u32 done, %2, 0;\n"
            "@done bra passed;\n"
            "again:\n"
            "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n"
            "passed:\n"
            "}"
            :
            : "r"(barrier), "r"(parity), "r"(passed)
            : "memory");
    }

    // Asks whether the next step's keys and this one's values are there. The answer takes as long as exponentials do, behind
    // which it is looked at. At head_dim 64 it was 1 % slower than to wait.
    __device__ __forceinline__ void look_ahead() {
        if constexpr (DIM > 64) {
            Ring<STAGES> next = key;
            next.advance();
            has_keys = mbarrier_test(shared + KEY_FULL + 8 * next.index(), next.parity());
            has_values = mbarrier_test(shared + VALUE_FULL + 8 * value.index(), value.parity());
        }
    }

    // Once per warp: the barriers count warps.
    __device__ __forceinline__ void release(u32 barrier) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
    }

    // Queries or keys, swizzled over their rows' width.
    static __device__ __forceinline__ u64 row_descriptor(u32 address) {
        return ROW == 128 ? wgmma_descriptor(address, 16, 8 * ROW) : wgmma_descriptor_64(address, 8 * ROW);
    }

    // S = Q K of the step in `key`.
    __device__ __forceinline__ void start_scores(Scores &s) const {
        const u64 q = row_descriptor(shared + QUERIES) + (query.index() * CONSUMERS + group) * (QUERY_BYTES / 16);
        const u64 k = row_descriptor(shared + KEYS) + key.index() * (KEY_BYTES / 16);
        renew(s);
        wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < DIM / 32; ++i) {
            const u32 part = i / (COLUMNS / 32), column = 2 * (i % (COLUMNS / 32));
            wgmma_e4m3_ss(s, q + part * (QUERY_PART / 16) + column, k + part * (KEY_PART / 16) + column, i != 0);
        }
        wgmma_commit();
    }

    // Of 32 keys. An instruction has 256 columns at most.
    template <int SUMS>
    static __device__ __forceinline__ void multiply_values(float (&o)[SUMS], const u32 *p, u64 v, int accumulate) {
        if constexpr (SUMS > 128) {
            wgmma_e4m3_rs(reinterpret_cast<float(&)[64]>(o), p, v, accumulate);
            wgmma_e4m3_rs(reinterpret_cast<float(&)[SUMS - 64]>(o[64]), p, v + 128 * VALUE_ROW / 16, accumulate);
        } else {
            wgmma_e4m3_rs(o, p, v, accumulate);
        }
    }

    // O += P V of the step in `value`, or O = P V.
    __device__ __forceinline__ void start_output(Probabilities &p, Output &o, int continues) const {
        const u64 v = wgmma_descriptor(shared + VALUES, 16, 8 * VALUE_ROW) + value.index() * (VALUE_STAGE / 16);
        pin(o);
        pin(p);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK / 32; ++i) multiply_values(o, p + 4 * i, v + 2 * i, i == 0 ? continues : 1);
        wgmma_commit();
    }

    __device__ __forceinline__ void release_keys() const { release(shared + KEY_EMPTY + 8 * key.index()); }

    // What most steps do without is behind one branch.
    __device__ __forceinline__ void finish_scores(const Tile &tile, const TileSteps &steps, Scores &s,
                                                  Rows &rows) const {
        if (steps.is_plain() && !rows.some_unset) return;
        const bool right = steps.masked_right(), left = steps.masked_left();
        if (steps.transformed()) steps.logits.transform(s);
        if (right || left) mask_keys(s, params, tile, steps.block, right, left);
        if (rows.some_unset) rows.set_first(s, steps.logits.exponent);
    }

    __device__ __forceinline__ void first_step(const Tile &tile, const TileSteps &steps, Scores &s, Probabilities &p,
                                               Rows &rows) {
        wgmma_wait<0>();
        pin(s);
        release_keys();
        if (steps.transformed()) steps.logits.transform(s);
        if (steps.masked_left()) mask_keys(s, params, tile, steps.block, false, true);
        rows.begin(s, steps.logits.exponent, KeysBefore(params, tile, warp_row, steps.block));
        pack_probabilities(p, s);
    }

    __device__ __forceinline__ void next_step(const Tile &tile, const TileSteps &steps, Scores &s, Probabilities &p,
                                              Output &o, Rows &rows, Stretches &stretches, int &continues) {
        key.advance();
        await_unless(has_keys, shared + KEY_FULL + 8 * key.index(), key.parity());
        see_rows();
        start_scores(s);
        await_unless(has_values, shared + VALUE_FULL + 8 * value.index(), value.parity());
        see_rows();
        start_output(p, o, continues);
        wgmma_wait<1>();
        pin(s);
        release_keys();
        finish_scores(tile, steps, s, rows);
        rows.subtract(s, steps.logits.exponent);
        wgmma_wait<0>();
        pin(o);
        pin(p);
        release(shared + VALUE_EMPTY + 8 * value.index());
        value.advance();
        look_ahead();
        float factor[2];
        if (rows.exponentials(p, s, factor)) {
#pragma unroll
            for (int i = 0; i < DIM / 2 + 4; ++i) o[i] *= factor[i / 2 % 2];
            stretches.rescale(factor);
        }
        continues = !stretches.add_step(o);
    }

    // A warpgroup without rows releases the buffers unread, and leaves the matrix unit to the others.
    __device__ __forceinline__ void idle_step() {
        key.advance();
        mbarrier_wait(shared + KEY_FULL + 8 * key.index(), key.parity());
        release_keys();
        mbarrier_wait(shared + VALUE_FULL + 8 * value.index(), value.parity());
        release(shared + VALUE_EMPTY + 8 * value.index());
        value.advance();
    }

    const FolioPrefillFp8Params &all;
    const FolioAttentionParams &params;
    u32 shared, group;
    u32 warp_row;  // of the tile, the warp's first
    Ring<TILE_SLOTS> slot;
    Ring<QUERY_STAGES> query;
    Ring<STAGES> key, value;
    u32 has_keys = 0, has_values = 0;  // when they were looked at
};

__device__ __forceinline__ void init_barriers(u32 shared) {
    constexpr u32 WARPS = 4 * CONSUMERS;
    for (int i = 0; i < TILE_SLOTS; ++i) {
        mbarrier_init(shared + TILE_FULL + 8 * i, 1);
        mbarrier_init(shared + TILE_READ + 8 * i, WARPS + TRANSPOSERS);
    }
    for (int i = 0; i < QUERY_STAGES; ++i) {
        mbarrier_init(shared + QUERY_FULL + 8 * i, 1);
        mbarrier_init(shared + QUERY_EMPTY + 8 * i, WARPS);
    }
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_init(shared + KEY_FULL + 8 * i, GATHERED ? 32 : 1);
        mbarrier_init(shared + KEY_EMPTY + 8 * i, WARPS);
        mbarrier_init(shared + VALUE_FULL + 8 * i, TRANSPOSERS);
        mbarrier_init(shared + VALUE_EMPTY + 8 * i, WARPS);
    }
    for (int i = 0; i < STAGES * TRANSPOSERS; ++i) mbarrier_init(shared + RAW_FULL + 8 * i, 1);
    for (int i = 0; i < PLACES; ++i) {
        mbarrier_init(shared + PLACE_FULL + 8 * i, MOST_BOXES);  // each of the lanes that write
        mbarrier_init(shared + PLACE_READ + 8 * i, TRANSPOSERS);
    }
    mbarrier_init_fence();
}

// The rows behind transposed values, for the sums of P.
__device__ __forceinline__ void write_ones(u32 shared) {
    constexpr u32 FOUR_ONES = 0x38383838, PIECES = ONES_BYTES / 16;
    const u32 ones[4] = {FOUR_ONES, FOUR_ONES, FOUR_ONES, FOUR_ONES};
    for (u32 i = threadIdx.x; i < VALUE_BUFFERS * PIECES; i += FOLIO_THREADS) {
        st_shared_v4(shared + VALUES + i / PIECES * VALUE_BYTES + ONES_OFFSET + i % PIECES * 16, ones);
    }
    fence_proxy_async();
}

// The maps of K and V are not read where rows are gathered.
__device__ __forceinline__ void attend(const FolioPrefillFp8Params &params, const TensorMap *q_map,
                                       const TensorMap *k_map, const TensorMap *v_map) {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    const u32 shared = shared_address(shared_bytes);
    if (threadIdx.x == 0) init_barriers(shared);
    if (threadIdx.x == 32) tensor_map_prefetch(q_map);
    if (!GATHERED && threadIdx.x == 64) tensor_map_prefetch(k_map);
    if (!GATHERED && threadIdx.x == 96) tensor_map_prefetch(v_map);
    write_ones(shared);
    __syncthreads();
    wait_for_prerequisites();
    if (threadIdx.x < PRODUCERS * WARPGROUP) {
        registers_shrink<PRODUCER_REGISTERS>();
        const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0);
        if (warp == 0) {
            allow_idle_dependents(params.attention.plan);
            Loader(params, q_map, k_map, shared_bytes).run();
        } else if (warp <= TRANSPOSERS) {
            Transposer(params, v_map, shared).run();
        }
    } else {
        registers_grow<CONSUMER_REGISTERS>();
        Consumer(params, shared).run();
        // Not earlier: waiting CTAs of the next grid on idle multiprocessors slow this one down.
        allow_dependents();
    }
}

}  // namespace folio::prefill_fp8

// Grid: any number of CTAs, FOLIO_THREADS each.
#if FOLIO_GATHERED
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_prefill_fp8_sm90_rows(const __grid_constant__ FolioPrefillFp8Params params,
                                const __grid_constant__ folio::TensorMap q_map) {
    folio::prefill_fp8::attend(params, &q_map, nullptr, nullptr);
}
#else
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_prefill_fp8_sm90(const __grid_constant__ FolioPrefillFp8Params params,
                           const __grid_constant__ folio::TensorMap q_map,
                           const __grid_constant__ folio::TensorMap k_map,
                           const __grid_constant__ folio::TensorMap v_map) {
    folio::prefill_fp8::attend(params, &q_map, &k_map, &v_map);
}
#endif
