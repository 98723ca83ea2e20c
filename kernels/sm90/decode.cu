// Split-KV decode attention for Hopper: a few packed query rows (q_len x group) per KV head, the keys streamed
// through per-warp rings, products by mma.sync. Memory-bound by design: every key is read once per row tile and the
// arithmetic hides behind it. Long queries belong to the prefill kernel.
//
// Grid (num_kv_heads / FOLIO_DECODE_HEADS, row tiles, items): heads fastest, so that CTAs that run together read the
// same pages. A CTA takes items z, z + gridDim.z, ... below counts[0]; the rest exit. Warp w takes tiles w,
// w + kWarps, ... of an item's keys on its own, without a barrier; the warps' results are merged through shared
// memory.
//
// Defines, one set per kernel-table row:
//   FOLIO_Q_BF16 | FOLIO_Q_F16                 type of q
//   FOLIO_KV_E4M3 | FOLIO_KV_E5M2 (optional)   type of the cache when it is not that of q
//   FOLIO_HEAD_DIM_QK, FOLIO_HEAD_DIM_VO       multiples of 64
//   FOLIO_DECODE_HEADS, FOLIO_DECODE_ROWS      KV heads per CTA and rows of each: 2 and 8, or 1 and 8 or 16
//   FOLIO_DECODE_WARPS, FOLIO_DECODE_STAGES, FOLIO_DECODE_TILE, FOLIO_DECODE_CTAS_PER_SM
#if defined(FOLIO_KV_E4M3) || defined(FOLIO_KV_E5M2)
#define FOLIO_KV_BYTES 1
#else
#define FOLIO_KV_BYTES 2
#endif

#include "common/output.cuh"
#include "common/tma.cuh"
#include "params.h"
#include "sm90/decode_load.cuh"
#include "sm90/decode_softmax.cuh"
#include "sm90/decode_work.cuh"

namespace folio {

// A warp's rows of partial results in shared memory; four floats of padding keep the stores off each other's banks.
constexpr int kMergePitch = kHeadDimVo + 4;
static_assert(8 * kColumnTiles * kMergePitch * 4 <= Shape::kWarpBytes);

struct alignas(16) MergeState {
    float peak[kWarps][8 * kColumnTiles], total[kWarps][8 * kColumnTiles];
};

// Shared memory: rings, barriers, MergeState, queries. src/cuda works out the same sum.
constexpr int kBarrierBytes = (kWarps * Shape::kStages * 8 + 15) / 16 * 16;
constexpr int kMergeOffset = Shape::kRingBytes + kBarrierBytes;
constexpr int kQueryOffset = kMergeOffset + static_cast<int>(sizeof(MergeState));

// Writes zeros over the values of keys that no row sees: 0 x NaN would reach the output.
__device__ __forceinline__ void clear_values(unsigned stage, unsigned boxes_log2, int token, const KeySpan &span,
                                             unsigned lane) {
    const StageStrides<Shape, Shape::kVRowBytes> strides(boxes_log2);
#pragma unroll 1
    for (unsigned piece = lane; piece < kHeads * kTileTokens * VTile::kRowChunks; piece += 32) {
        const unsigned chunk = piece % VTile::kRowChunks, row = piece / VTile::kRowChunks % kTileTokens;
        const unsigned head = piece / (VTile::kRowChunks * kTileTokens);
        const int key = token + static_cast<int>(row);
        if (key < span.begin || key >= span.end) {
            store_shared_zero_16(stage + Shape::kKBytes + head * strides.head + row / 8 * strides.group +
                                 VTile::at(row & 7, chunk));
        }
    }
    fence_proxy_async();
    __syncwarp();
}

// Leaves a warp's rows in shared memory, over its own ring, which is drained.
__device__ __forceinline__ void publish(const WarpState &state, MergeState &merge, float *rows, unsigned num_rows,
                                        unsigned warp, unsigned lane) {
    const unsigned g = lane >> 2;
#pragma unroll
    for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float sum = state.total[c][j];
#pragma unroll
            for (int lanes = 4; lanes <= 16; lanes *= 2) {
                sum += __shfl_xor_sync(~0u, sum, lanes);
            }
            const unsigned row = 2 * (lane & 3) + j;
            if (8 * (c % kRowTiles) + row >= num_rows) {
                continue;
            }
            if (g == 0) {
                merge.peak[warp][8 * c + row] = state.peak[c][j];
                merge.total[warp][8 * c + row] = sum;
            }
            float *out = rows + (8 * c + row) * kMergePitch + Op::first_dim(g);
#pragma unroll
            for (int b = 0; b < WarpState::kBlocks; ++b) {
                out[16 * b] = state.o[c][b][j];
                out[16 * b + Op::kDimStep] = state.o[c][b][2 + j];
            }
        }
    }
}

// Where one row's result goes, and what it is multiplied by.
struct RowSink {
    const FolioAttentionParams &params;
    const FolioDecodeLaunch &launch;
    const Item &item;

    __device__ __forceinline__ void store(unsigned kv_head, unsigned row, unsigned column, float4 sum,
                                          SoftmaxTotal total) const {
        const PackedRow packed = packed_row(launch, item, row);
        const unsigned head = kv_head * launch.group_size + packed.head;
        if (item.work.partial != FOLIO_NO_PARTIAL) {
            const folio_i64 entry =
                static_cast<folio_i64>(item.work.partial + packed.query) * params.num_qo_heads + head;
            const float scale = total.total == 0.f ? 0.f : 1.f / total.total;
            *reinterpret_cast<float4 *>(params.plan.partial_o + entry * kHeadDimVo + column) = scaled(sum, scale);
            if (column == 0) {
                params.plan.partial_lse[entry] = total.base2_lse();
            }
            return;
        }
        const folio_i64 token = static_cast<folio_i64>(item.place.q_token) + packed.query;
        float rescale = 1.f;
        if (params.sinks) {
            total = add_sink(total, params.sinks[head] * kLog2E, rescale);
        }
        const float scale = total.total == 0.f ? 0.f : rescale / total.total;
        store_output4(output_row(params.o, launch.output_type, token, head), launch.output_type, column,
                      scaled(sum, scale * output_scale(params, launch.output_type, kv_head)));
        if (column == 0 && params.lse) {
            store_lse(params, token, head, total);
        }
    }
};

// Sums the warps' rows in the order of the warps and stores them.
__device__ __forceinline__ void merge_warps(const MergeState &merge, const unsigned char *ring, const RowSink &sink) {
    constexpr unsigned kPieces = kHeadDimVo / 4;
    const unsigned num_rows = sink.item.num_rows;
    for (unsigned n = threadIdx.x; n < kHeads * num_rows * kPieces; n += kThreads) {
        const unsigned head = kHeads == 2 && n >= num_rows * kPieces;
        const unsigned row = n / kPieces - head * num_rows, column = n % kPieces * 4;
        const unsigned slot = head * kRows + row;
        float peak = merge.peak[0][slot];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
            peak = fmaxf(peak, merge.peak[w][slot]);
        }
        float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
        float total = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float weight = exp2_approx(merge.peak[w][slot] - peak);
            const float4 x = *reinterpret_cast<const float4 *>(
                ring + w * Shape::kWarpBytes + (slot * kMergePitch + column) * sizeof(float));
            sum = multiply_add(weight, x, sum);
            total += weight * merge.total[w][slot];
        }
        sink.store(sink.item.kv_head + head, row, column, sum, {peak, total});
    }
}

template <class Loader>
__device__ __forceinline__ void decode(const TensorMap *k_map, const TensorMap *v_map,
                                       const FolioAttentionParams &params, const FolioDecodeLaunch &launch) {
    extern __shared__ __align__(1024) unsigned char shared[];
    MergeState &merge = *reinterpret_cast<MergeState *>(shared + kMergeOffset);
    NarrowFragment *query = reinterpret_cast<NarrowFragment *>(shared + kQueryOffset);
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned ring = shared_address(shared) + warp * Shape::kWarpBytes;
    const unsigned barriers = shared_address(shared) + Shape::kRingBytes + warp * Shape::kStages * 8;
    Loader loader(k_map, v_map, params, launch, ring, barriers, warp, lane);
    const TileAddress at(launch.boxes_log2, lane);
    int stage = 0;
    unsigned parity = 0;

    grid_dependency_wait();
    const unsigned num_items = params.plan.counts[0];
    for (unsigned index = blockIdx.z; index == blockIdx.z || index < num_items; index += gridDim.z) {
        // Read before it is known whether there is such an item: one round trip less.
        const Item item = read_item(params, launch, index);
        if (index >= num_items) {
            return;
        }
        if (num_items - index <= gridDim.z) {
            // The combine kernel may come and read its part of the plan; it waits for the results by itself.
            grid_dependency_trigger();
        }
        if (item.num_rows == 0) {
            continue;
        }
        const TileSpan span = tile_span(params, launch, item, warp);
        loader.begin(span.keys, span.tiles);
        for (int i = 0; i < Shape::kStages; ++i) {
            loader.issue(i, stage + i < Shape::kStages ? stage + i : stage + i - Shape::kStages);
        }
        const LaneRows rows = lane_rows(params, launch, item, lane);
        ScoreRule rule = score_rule(params, launch, item, lane);
        QueryRows q;
        q.load(params, launch, item, query, warp, lane, rule);
        WarpState state;
        state.reset();
        int token = span.keys.first + static_cast<int>(warp) * kTileTokens;
#pragma unroll 1
        for (int i = 0; i < span.tiles; ++i) {
            loader.wait(stage, parity);
            const unsigned tile = ring + stage * Shape::kStageBytes;
            const bool edge = token < span.inner_begin || token + kTileTokens > span.inner_end;
            if (!Loader::kZeroFillsRows && edge) {
                clear_values(tile, launch.boxes_log2, token, span.keys, lane);
            }
            state.add_tile(q, rule, rows, tile, at, token, edge, lane);
            __syncwarp();
            loader.issue(i + Shape::kStages, stage);
            if (++stage == Shape::kStages) {
                stage = 0;
                parity ^= 1;
            }
            token += kWarps * kTileTokens;
        }
        publish(state, merge, reinterpret_cast<float *>(shared + warp * Shape::kWarpBytes), item.num_rows, warp, lane);
        __syncthreads();
        merge_warps(merge, shared, {params, launch, item});
        fence_proxy_async();
        __syncthreads();
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(folio::kThreads, FOLIO_DECODE_CTAS_PER_SM)
folio_sm90_decode_tma(const __grid_constant__ folio::TensorMap k_map, const __grid_constant__ folio::TensorMap v_map,
                      const __grid_constant__ FolioAttentionParams params,
                      const __grid_constant__ FolioDecodeLaunch launch) {
    folio::decode<folio::TmaLoader<folio::Shape>>(&k_map, &v_map, params, launch);
}

extern "C" __global__ void __launch_bounds__(folio::kThreads, FOLIO_DECODE_CTAS_PER_SM)
folio_sm90_decode_gather(const __grid_constant__ FolioAttentionParams params,
                         const __grid_constant__ FolioDecodeLaunch launch) {
    folio::decode<folio::GatherLoader<folio::Shape>>(nullptr, nullptr, params, launch);
}
