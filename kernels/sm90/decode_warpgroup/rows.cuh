// The query rows of a work item as a warpgroup has them: all of them as an operand in shared memory, and what is known of each
// beside it. Nothing about keys but which of them a row sees.
#pragma once

#include "sm90/decode/query.cuh"
#include "sm90/decode/store.cuh"
#include "sm90/decode_warpgroup/stages.cuh"

namespace folio::decode {

// Read where it is needed: registers have no room for it beside the outputs of many rows.
struct RowTable {
    RowTarget targets[ROWS];  // at the item's end
    KeyRange keys[ROWS];      // of the item's, those that the row sees
    i32 position[ROWS];
    float slope[ROWS];
    float scale[ROWS];  // of its products
};
static_assert(sizeof(RowTable) == ROWS * ROW_FACTS_BYTES);

// What logits of an item's head are beside products: a scale, which plain ones leave to the exponent, where it costs nothing.
struct ItemLogits {
    LogitRule rule;
    float factor;
    bool direct;

    __device__ __forceinline__ ItemLogits(const FolioPaddedDecodeParams &params, const Item &item)
        : rule(params.attention),
          factor(rule.scale<CapDivision::BY_RECIPROCAL>(params.attention, item.kv_head, item.work.request)),
          direct(rule.plain() && factor > 0.0f) {}

    // Of a row that was divided by `power`. Not 0 in an exponent, where the row's numbers are next to nothing: its product with
    // the logit of a hidden key would be NaN.
    __device__ __forceinline__ float scale(float power) const {
        return direct ? fmaxf(factor * power, 1e-30f) : factor * power;
    }
};

// A thread for a row.
__device__ __forceinline__ void describe_rows(RowTable &table, const FolioPaddedDecodeParams &params,
                                              const Item &item) {
    static_assert(ROWS <= CONSUMER_THREADS);
    const u32 row = threadIdx.x;
    if (row >= ROWS) return;
    const FolioAttentionParams &p = params.attention;
    const PackedRow packed = packed_row(params, item, row);
    const i32 position = item.work.position + static_cast<i32>(packed.query);
    table.keys[row] = item_window(p, item).keys(position, item_keys(item));
    table.position[row] = position;
    table.slope[row] = LogitRule(p).slope(p, item.work.request, item.kv_head * params.group_size + packed.head);
}

// Queries are [64 columns][row][128 bytes] with the 128-byte swizzle, as the narrow operand of wgmma.
constexpr int QUERY_ATOM_BYTES = ROWS * 128;

// Eight rows at a time for a warp. Columns are in the order that keys come to the products in.
__device__ __forceinline__ void load_queries(u8 *queries, RowTable &table, const FolioPaddedDecodeParams &params,
                                             const Item &item, const ItemLogits &logits, u32 warp, u32 lane) {
    const u32 g = lane / 4;
#pragma unroll 1
    for (u32 eight = warp; eight < ROW_TILES; eight += CONSUMERS) {
        NarrowFragment fragments[QUERY_STEPS];
        read_query(fragments, params, item, static_cast<int>(eight), lane);
        const float power = params.bf16_queries ? narrow_to_f16(fragments) : 1.0f;
        if (lane % 4 == 0) table.scale[8 * eight + g] = logits.scale(power);
        u8 *row = queries + (8 * eight + g) * 128 + lane % 4 * 4;
#pragma unroll
        for (int k = 0; k < QUERY_STEPS; ++k) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 chunk = k % 4 * 2 + half;
                *reinterpret_cast<u32 *>(row + k / 4 * QUERY_ATOM_BYTES + ((chunk ^ g) << 4)) = fragments[k].r[half];
            }
        }
    }
}

}  // namespace folio::decode
