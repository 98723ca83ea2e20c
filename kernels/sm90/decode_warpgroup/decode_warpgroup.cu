// Split-KV decode attention for Hopper with many packed query rows (q_len x group) over elements of a byte. Where each warp
// multiplies by itself, as in sm90/decode, every one of them converts keys for 32 rows; here a warpgroup multiplies together
// and converts each key once. Items and grid are those of sm90/decode.
//
// The kernel table's defines as there; FOLIO_DECODE_WARPGROUP is 1, FOLIO_KV_TILE the keys of a step.
#include "sm90/decode_warpgroup/load.cuh"
#include "sm90/decode_warpgroup/output.cuh"

namespace folio::decode {

// Shared memory: stages, queries, weights, statistics, the table of rows, barriers.
constexpr int QUERY_OFFSET = STAGES * STAGE_BYTES, WEIGHT_OFFSET = QUERY_OFFSET + QUERY_BYTES;
constexpr int STATISTICS_OFFSET = WEIGHT_OFFSET + 2 * WEIGHT_BYTES;
constexpr int TABLE_OFFSET = STATISTICS_OFFSET + STATISTICS_BYTES;
constexpr int BARRIER_OFFSET = TABLE_OFFSET + static_cast<int>(sizeof(RowTable));
static_assert(BARRIER_OFFSET + STAGES * 16 == FOLIO_SHARED_BYTES, "the row's shared memory");
static_assert(FOLIO_SHARED_BYTES <= BLOCK_BYTES, "two CTAs have room on a multiprocessor");
static_assert(QUERY_OFFSET % 1024 == 0 && WEIGHT_OFFSET % 1024 == 0 && BARRIER_OFFSET % 8 == 0);

// Of the 128 that each thread would have. 64 outputs of a thread leave few to those who bring keys.
constexpr int PRODUCER_REGISTERS = BLOCKS * SUMS < 64 ? 48 : 40, CONSUMER_REGISTERS = 256 - PRODUCER_REGISTERS;

// Calls `each` with the items of the CTA that have rows, and their numbers.
template <class Each>
__device__ __forceinline__ void for_items(const FolioPaddedDecodeParams &params, const Each &each) {
    const u32 num_items = params.attention.plan.counts[FOLIO_COUNT_ITEMS];
    for (u32 index = blockIdx.z; index == blockIdx.z || index < num_items; index += gridDim.z) {
        // Read before it is known whether there is such an item: one round trip less.
        const Item item = read_item(params, index);
        if (index >= num_items) return;
        if (num_items - index <= gridDim.z) {
            // The combine kernel may start and read its part of the plan; it waits for the results itself.
            allow_dependents();
        }
        if (item.num_rows > 0) each(item, index);
    }
}

template <class Loader>
__device__ __forceinline__ void produce(const FolioPaddedDecodeParams &params, const TensorMap *k_map,
                                        const TensorMap *v_map, const Stages &stages, u32 warp, u32 lane) {
    Loader loader(params, k_map, v_map, stages, warp, lane);
    Stage stage;
    for_items(params, [&](const Item &item, u32) {
        const StepSpan span(params, item);
        loader.begin(span, item.kv_head);
#pragma unroll 1
        for (i32 i = 0; i < span.steps; ++i) {
            mbarrier_wait(stages.empty(stage), stage.parity ^ 1);
            loader.load(i, stage);
            stage.advance();
        }
    });
}

// Writes zeros over the values of keys that no row sees: 0 x NaN would reach the output. All consumers call this together.
__device__ __forceinline__ void clear_values(u32 values, i32 token, const KeyRange &some) {
    const u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (u32 piece = threadIdx.x; piece < STEP_TOKENS * VTile::ROW_CHUNKS; piece += CONSUMER_THREADS) {
        const u32 chunk = piece % VTile::ROW_CHUNKS, row = piece / VTile::ROW_CHUNKS;
        if (some.holds(token + static_cast<i32>(row))) continue;
        st_shared_v4(values + row / 8 * VTile::GROUP_BYTES + VTile::at(row & 7, chunk), zeros);
    }
    fence_proxy_async();
    group_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
}

template <bool ZERO_FILLS_ROWS>
__device__ __forceinline__ void consume(const FolioPaddedDecodeParams &params, u8 *shared, const Stages &stages,
                                        u32 warp, u32 lane) {
    Statistics &statistics = *reinterpret_cast<Statistics *>(shared + STATISTICS_OFFSET);
    RowTable &table = *reinterpret_cast<RowTable *>(shared + TABLE_OFFSET);
    const u32 weights = shared_address(shared) + WEIGHT_OFFSET;
    const u64 queries = wgmma_descriptor(shared_address(shared) + QUERY_OFFSET, 16, 1024);
    const u64 weight_operand = wgmma_plain_descriptor(weights, WEIGHT_KEYS_BYTES, 128);
    Stage stage;
    for_items(params, [&](const Item &item, u32 index) {
        const StepSpan span(params, item);
        describe_rows(table, params, item);
        const ItemLogits logits(params, item);
        load_queries(shared + QUERY_OFFSET, table, params, item, logits, warp, lane);
        fence_proxy_async();
        group_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
        Softmax softmax(logits, table, statistics, warp, lane);
        Values values;
        i32 token = span.first;
        u32 set = 0;
#pragma unroll 1
        for (i32 i = 0; i < span.steps; ++i) {
            const u32 keys = stages.keys(stage);
            const bool edge = token < span.all.begin || token + STEP_TOKENS > span.all.end;
            mbarrier_wait(stages.full(stage), stage.parity);
            if (!ZERO_FILLS_ROWS && edge) clear_values(keys + K_BYTES, token, span.some);
            Scores scores;
            scores.load(keys, warp, lane);
            values.end_product(softmax.o);
            scores.begin(queries);
            values.load(keys + K_BYTES, warp, lane);
            scores.end();
            if (lane == 0) mbarrier_arrive(stages.empty(stage));
            softmax.add_step(scores.s, token, edge, weights + set * WEIGHT_BYTES);
            values.begin_product(softmax.o, weight_operand + set * (WEIGHT_BYTES / 16));
            set ^= 1;
            stage.advance();
            token += STEP_TOKENS;
        }
        values.end_product(softmax.o);
        // Read once more instead of kept: outputs fill the registers.
        store_rows(params, read_item(params, index), softmax, table, warp, lane);
    });
}

template <class Loader>
__device__ __forceinline__ void run(const FolioPaddedDecodeParams &params, const TensorMap *k_map,
                                    const TensorMap *v_map) {
    extern __shared__ __align__(1024) u8 shared[];
    const u32 warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const Stages stages = {shared_address(shared), shared_address(shared) + BARRIER_OFFSET};
    if (threadIdx.x == 0) {
        Stage stage;
        for (int i = 0; i < STAGES; ++i, stage.advance()) {
            mbarrier_init(stages.full(stage), Loader::ARRIVALS);
            mbarrier_init(stages.empty(stage), CONSUMERS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    wait_for_prerequisites();
    if (warp >= CONSUMERS) {
        registers_shrink<PRODUCER_REGISTERS>();
        produce<Loader>(params, k_map, v_map, stages, warp - CONSUMERS, lane);
    } else {
        registers_grow<CONSUMER_REGISTERS>();
        consume<Loader::ZERO_FILLS_ROWS>(params, shared, stages, warp, lane);
    }
}

}  // namespace folio::decode

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_sm90_decode_warpgroup_tma(const __grid_constant__ folio::decode::Params params,
                                    const __grid_constant__ folio::TensorMap k_map,
                                    const __grid_constant__ folio::TensorMap v_map) {
    folio::decode::run<folio::decode::BoxLoader>(params, &k_map, &v_map);
}

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_sm90_decode_warpgroup_gather(const __grid_constant__ folio::decode::Params params) {
    folio::decode::run<folio::decode::RowLoader>(params, nullptr, nullptr);
}
