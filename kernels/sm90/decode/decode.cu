// Split-KV decode attention for Hopper: a few packed query rows (q_len x group) per KV head, the keys streamed
// through per-warp rings, products by mma.sync. Memory-bound by design: every key is read once per row tile and the
// arithmetic hides behind it. Long queries belong to the prefill kernel.
//
// Grid (num_kv_heads / FOLIO_DECODE_HEADS, row tiles of the largest item, items): heads fastest, so that CTAs that run
// together read the same pages. A CTA takes items z, z + gridDim.z, ... below the number of items; the rest exit. Key group g of
// its warps takes tiles g, g + KEY_GROUPS, ... of an item's keys on its own: a warp for up to 16 or 32 rows, without a
// barrier, or several that wait for each other after every tile. The results are merged through shared memory.
//
// The kernel table's defines (FOLIO_Q_TILE: packed rows per KV head; FOLIO_KV_TILE: keys of a warp's step), and
// FOLIO_DECODE_HEADS, KV heads of a CTA: 1, or 2 with 8 rows each. FOLIO_CACHE_FORM: form.cuh. FOLIO_BY_TMA, FOLIO_GATHERED and
// FOLIO_TAKES_NEW_TOKENS: which kernels there are, of them that which makes queries and keys itself (new_tokens.cuh).
#include "sm90/decode/output.cuh"

namespace folio::decode {

// Shared memory: rings of rows, and of what is beside them; barriers, MergeState, queries.
constexpr int BARRIER_OFFSET = Shape::ALL_RINGS_BYTES + Shape::ALL_RINGS_BYTES_BESIDE;
constexpr int BARRIER_BYTES = (KEY_GROUPS * Shape::STAGES * 8 + 15) / 16 * 16;
constexpr int MERGE_OFFSET = BARRIER_OFFSET + BARRIER_BYTES;
constexpr int QUERY_OFFSET = MERGE_OFFSET + static_cast<int>(sizeof(MergeState));
static_assert(QUERY_OFFSET + QUERY_BYTES == FOLIO_SHARED_BYTES, "the row's shared memory");
static_assert(FOLIO_SHARED_BYTES <= BLOCK_BYTES, "two CTAs have room on a multiprocessor");

// Writes zeros over the values of keys that no row sees: 0 x NaN would reach the output. Elements of blocks are numbers, and their
// scales are zeros there.
__device__ __forceinline__ void clear_values(u32 stage, u32 boxes_log2, i32 token, const KeySpan &span, u32 lane) {
    const StageStrides<Shape, VTile> strides(boxes_log2);
    const u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (u32 piece = lane; piece < HEADS * TILE_TOKENS * VTile::ROW_CHUNKS; piece += 32) {
        const u32 chunk = piece % VTile::ROW_CHUNKS, row = piece / VTile::ROW_CHUNKS % TILE_TOKENS;
        const u32 head = piece / (VTile::ROW_CHUNKS * TILE_TOKENS);
        const i32 key = token + static_cast<i32>(row);
        if (key < span.begin || key >= span.end) {
            st_shared_v4(stage + Shape::K_BYTES + head * strides.head + row / 16 * strides.block +
                             row / 8 % 2 * strides.group + VTile::at(row & 7, chunk),
                         zeros);
        }
    }
    fence_proxy_async();
    __syncwarp();
}

template <class Loader, class Tokens>
__device__ __forceinline__ void run(const FolioPaddedDecodeParams &params, const TensorMap *k_map,
                                    const TensorMap *v_map, const Tokens &tokens) {
    extern __shared__ __align__(1024) u8 shared[];
    MergeState &merge = *reinterpret_cast<MergeState *>(shared + MERGE_OFFSET);
    NarrowFragment *query = reinterpret_cast<NarrowFragment *>(shared + QUERY_OFFSET);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    asm volatile("" : "+r"(warp), "+r"(lane));  // else the special register is read for every tile
    const WarpPlace place = {warp / ROW_GROUPS, warp % ROW_GROUPS};
    const u32 ring = shared_address(shared) + place.key_group * Shape::RING_BYTES;
    const u32 beside = shared_address(shared) + Shape::ALL_RINGS_BYTES + place.key_group * Shape::RING_BYTES_BESIDE;
    const u32 barriers = shared_address(shared) + BARRIER_OFFSET + place.key_group * Shape::STAGES * 8;
    Loader loader(k_map, v_map, params, ring, beside, barriers, place, lane);
    const TileAddress at(params.boxes_log2, lane);
    const E2m1Shifts shifts;
    int stage = 0;
    u32 parity = 0;

    wait_for_prerequisites();
    const u32 num_items = params.attention.plan.counts[FOLIO_COUNT_ITEMS];
    for (u32 index = blockIdx.z; index == blockIdx.z || index < num_items; index += gridDim.z) {
        // Read before it is known whether there is such an item: one round trip less.
        const Item item = read_item(params, index);
        if (index >= num_items) return;
        if (num_items - index <= gridDim.z) {
            // The combine kernel may start and read its part of the plan; it waits for the results itself.
            allow_dependents();
        }
        if (item.num_rows == 0) continue;
        const TileSpan span(params, item, place.key_group);
        typename Tokens::Fetched fetched = tokens.fetch(params, item);
        loader.begin(span.keys, span.tiles);
        tokens.fetch_angles(params, fetched);
        for (int i = 0; i < Shape::STAGES; ++i) {
            loader.issue(i, stage + i < Shape::STAGES ? stage + i : stage + i - Shape::STAGES);
        }
        tokens.make(params, item, fetched);
        const Item part = item.part(place.row_group);
        const LaneRows rows(params, part, lane);
        const KeyRange some = {span.keys.begin, span.keys.end};
        const OwnRow own(params, part, some, lane);
        LaneLogits logits(params, part, lane);
        QueryRows q;
        q.load(params, part, query, place, lane, logits, tokens);
        WarpState state;
        state.reset();
        i32 token = span.keys.first + static_cast<i32>(place.key_group) * TILE_TOKENS;
#pragma unroll 1
        for (int i = 0; i < span.tiles; ++i) {
            loader.wait(stage, parity);
            const u32 tile = ring + stage * Shape::STAGE_BYTES;
            tokens.add_to_tile(params, item, tile, place, token, lane);
            const bool edge = token < span.inner.begin || token + TILE_TOKENS > span.inner.end;
            if (!Loader::ZERO_FILLS_ROWS && !BLOCK_SCALES && edge) {
                clear_values(tile, params.boxes_log2, token, span.keys, lane);
            }
            SeenKeys seen;
            if (edge) seen.gather(own.seen(params.attention, part, some, token), lane);
            const u32 scales = beside + stage * Shape::STAGE_BYTES_BESIDE;
            const TokenFactors factors(scales, lane);
            const BlockFactors blocks(scales, lane, shifts);
            state.add_tile(q, logits, rows, seen, factors, blocks, tile, at, token, edge, lane);
            place.sync_group<Shape>();
            loader.issue(i + Shape::STAGES, stage);
            if (++stage == Shape::STAGES) {
                stage = 0;
                parity ^= 1;
            }
            token += KEY_GROUPS * TILE_TOKENS;
        }
        publish(state, merge, reinterpret_cast<float *>(shared + warp * MERGE_BYTES), item.rows_of(place.row_group),
                warp, lane);
        __syncthreads();
        // Scales of channels fill the registers: there the item is read once more instead of kept.
        merge_warps(params, CHANNEL_SCALES ? read_item(params, index) : item, merge, shared);
        fence_proxy_async();
        __syncthreads();
    }
}

// By TMA.
typedef TileLoader<Shape, TmaLoader<Shape>> Boxes;

}  // namespace folio::decode

#if FOLIO_BY_TMA
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_sm90_decode_tma(const __grid_constant__ folio::decode::Params params,
                          const __grid_constant__ folio::TensorMap k_map,
                          const __grid_constant__ folio::TensorMap v_map) {
    using namespace folio::decode;
    run<Boxes>(params, &k_map, &v_map, CachedTokens());
}
#endif

#if FOLIO_GATHERED
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_sm90_decode_gather(const __grid_constant__ folio::decode::Params params) {
    using namespace folio::decode;
    run<TileLoader<Shape, GatherLoader<Shape>>>(params, nullptr, nullptr, CachedTokens());
}
#endif

#if FOLIO_TAKES_NEW_TOKENS
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_sm90_decode_tma_new_tokens(const __grid_constant__ FolioNewTokensParams params,
                                     const __grid_constant__ folio::TensorMap k_map,
                                     const __grid_constant__ folio::TensorMap v_map) {
    using namespace folio::decode;
    extern __shared__ __align__(1024) folio::u8 shared[];
    run<Boxes>(params.decode, &k_map, &v_map, NewTokens(params.rope, shared + FOLIO_SHARED_BYTES));
}
#endif
