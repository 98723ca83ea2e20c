// The end of a decode work item: the warps' sums are merged through shared memory, and rows are stored to the output,
// or to the partial results where the item is one chunk of several. No keys or values here.
#pragma once

#include "sm90/decode/channels.cuh"
#include "sm90/decode/softmax.cuh"

namespace folio::decode {

// A warp's rows in shared memory; four floats of padding spread the stores over the banks.
constexpr int MERGE_PITCH = HEAD_DIM_VO + 4;
// Where they lie: a warp's part of its ring.
constexpr int MERGE_BYTES = Shape::ALL_RINGS_BYTES / WARPS;
static_assert(8 * COLUMN_TILES * MERGE_PITCH * 4 <= MERGE_BYTES && MERGE_BYTES % 16 == 0);

struct alignas(16) MergeState {
    float max[WARPS][8 * COLUMN_TILES], sum[WARPS][8 * COLUMN_TILES];
};
static_assert(sizeof(MergeState) == SUMS_BYTES);

__device__ __forceinline__ float4 scaled(float4 x, float f) { return make_float4(x.x * f, x.y * f, x.z * f, x.w * f); }

// Leaves a warp's rows in shared memory, over its part of the rings, which are drained.
__device__ __forceinline__ void publish(const WarpState &state, MergeState &merge, float *rows, u32 num_rows, u32 warp,
                                        u32 lane) {
    const u32 g = lane >> 2;
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float sum = state.row_sum[c][j];
#pragma unroll
            for (int lanes = 4; lanes <= 16; lanes *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lanes);
            const u32 row = 2 * (lane & 3) + j;
            if (8 * (c % ROW_TILES) + row >= num_rows) continue;
            if (g == 0) {
                merge.max[warp][8 * c + row] = state.row_max[c][j];
                merge.sum[warp][8 * c + row] = sum;
            }
            float *out = rows + (8 * c + row) * MERGE_PITCH + Op::first_dim(g);
#pragma unroll
            for (int b = 0; b < WarpState::BLOCKS; ++b) {
                out[Op::block_dim(b)] = state.o[c][b][j];
                out[Op::block_dim(b) + Op::DIM_STEP] = state.o[c][b][2 + j];
            }
        }
    }
}

// Four neighbouring elements; rows are aligned to four elements.
__device__ __forceinline__ void store_four(void *base, u32 dtype, i64 index, float4 x) {
    switch (dtype) {
        case FOLIO_F32: *reinterpret_cast<float4 *>(static_cast<float *>(base) + index) = x; break;
        case FOLIO_F16:
            *reinterpret_cast<uint2 *>(static_cast<u16 *>(base) + index) =
                make_uint2(f16::pack(x.x, x.y), f16::pack(x.z, x.w));
            break;
        case FOLIO_BF16:
            *reinterpret_cast<uint2 *>(static_cast<u16 *>(base) + index) =
                make_uint2(bf16::pack(x.x, x.y), bf16::pack(x.z, x.w));
            break;
        default: {
            const float all[4] = {x.x, x.y, x.z, x.w};
            u32 bytes = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                bytes |= static_cast<u32>(dtype == FOLIO_E4M3 ? e4m3::store(all[i]) : e5m2::store(all[i])) << 8 * i;
            }
            *reinterpret_cast<u32 *>(static_cast<u8 *>(base) + index) = bytes;
        }
    }
}

// Columns column .. column + 3 of row `row` of a KV head: `sum`, relative to the state's maximum.
__device__ __forceinline__ void store_row(const FolioPaddedDecodeParams &params, const Item &item, u32 kv_head, u32 row,
                                          u32 column, float4 sum, RowState state) {
    const FolioAttentionParams &p = params.attention;
    const PackedRow packed = packed_row(params, item, row);
    const u32 head = kv_head * params.group_size + packed.head;
    if constexpr (CHANNEL_SCALES) sum = channel_values(stored_params(params).cache.v, kv_head, column, sum, state.sum);
    if (item.work.partial != FOLIO_NO_PARTIAL) {
        const i64 at = static_cast<i64>(item.work.partial + packed.query) * p.num_qo_heads + head;
        const float factor = state.sum == 0.0f ? 0.0f : part_scale(p, kv_head, item.work.request) / state.sum;
        *reinterpret_cast<float4 *>(p.plan.partial_o + at * params.head_dim_vo + column) = scaled(sum, factor);
        if (column == 0) p.plan.partial_lse[at] = log_sum_exp(state);
        return;
    }
    const i64 token = static_cast<i64>(item.work.q_token) + packed.query;
    float factor = p.v_scale * value_scale(p, kv_head, item.work.request);
    if (params.o_dtype >= FOLIO_E4M3) factor /= p.o_scale;
    if (p.sinks) factor *= add_sink(state, p.sinks[head] * LOG2_E);
    factor = state.sum == 0.0f ? 0.0f : factor / state.sum;
    store_four(p.o.data, params.o_dtype, token * p.o.stride_token + head * p.o.stride_head + column,
               scaled(sum, factor));
    if (column == 0 && p.lse) {
        p.lse[token * p.lse_stride_token + head * p.lse_stride_head] = lse_in_base(log_sum_exp(state), p.flags);
    }
}

// Sums the rows of the key groups in their order and stores them.
__device__ __forceinline__ void merge_warps(const FolioPaddedDecodeParams &params, const Item &item,
                                            const MergeState &merge, const u8 *rings) {
    constexpr u32 PIECES = HEAD_DIM_VO / 4;
    for (u32 n = threadIdx.x; n < HEADS * item.num_rows * PIECES; n += THREADS) {
        const u32 head = HEADS == 2 && n >= item.num_rows * PIECES;
        const u32 row = n / PIECES - head * item.num_rows, column = n % PIECES * 4;
        if (column >= params.head_dim_vo) continue;
        const u32 slot = head * ROWS + row % WARP_ROWS, row_group = row / WARP_ROWS;
        RowState state = {merge.max[row_group][slot], 0.0f};
#pragma unroll
        for (int g = 1; g < KEY_GROUPS; ++g) {
            state.max = fmaxf(state.max, merge.max[g * ROW_GROUPS + row_group][slot]);
        }
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int g = 0; g < KEY_GROUPS; ++g) {
            const u32 w = g * ROW_GROUPS + row_group;
            const float weight = exp2_approx(merge.max[w][slot] - state.max);
            const float4 x = *reinterpret_cast<const float4 *>(rings + w * MERGE_BYTES +
                                                               (slot * MERGE_PITCH + column) * sizeof(float));
            sum.x += weight * x.x;
            sum.y += weight * x.y;
            sum.z += weight * x.z;
            sum.w += weight * x.w;
            state.sum += weight * merge.sum[w][slot];
        }
        store_row(params, item, item.kv_head + head, row, column, sum, state);
    }
}

}  // namespace folio::decode
