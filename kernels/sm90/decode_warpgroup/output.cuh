// The end of a work item: rows go from registers to where they belong.
#pragma once

#include "sm90/decode_warpgroup/softmax.cuh"

namespace folio::decode {

// Lane 4 g + i has dimensions 2 g and 2 g + 1 of a block of two neighbouring rows. It gives its neighbour 4 lanes away one of
// them, and gets the rest of the other: four dimensions of one row.
class LaneOutputs {
public:
    __device__ __forceinline__ LaneOutputs(const FolioPaddedDecodeParams &params, const Item &item,
                                           const Softmax &softmax, const RowTable &table, u32 warp, u32 lane)
        : params(params), num_rows(item.num_rows), softmax(softmax), table(table), warp(warp), lane(lane) {}

    // Calls `write` with the element of each four, and with their numbers. It should be one store: tests of many types between
    // stores take longer than the stores.
    template <class Write>
    __device__ __forceinline__ void store(const Write &write) const {
        const bool odd = lane & 4;
#pragma unroll
        for (int t = 0; t < ROW_TILES; ++t) {
            const u32 row = softmax.row(t, odd);
            const RowTarget target = table.targets[row];
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                const float *of = softmax.o[b] + 4 * t;
                const float x = __shfl_xor_sync(FULL_WARP, odd ? of[0] : of[1], 4);
                const float y = __shfl_xor_sync(FULL_WARP, odd ? of[2] : of[3], 4);
                const float4 four = odd ? make_float4(x, y, of[1], of[3]) : make_float4(of[0], of[2], x, y);
                const u32 column = Values::first_dim(b, warp, lane & ~4);
                if (row < num_rows && column < params.head_dim_vo) {
                    write(target.element + column, scaled(four, target.factor));
                }
            }
        }
    }

private:
    const FolioPaddedDecodeParams &params;
    u32 num_rows;
    const Softmax &softmax;
    const RowTable &table;
    u32 warp, lane;
};

// All consumers call this together.
__device__ __forceinline__ void store_rows(const FolioPaddedDecodeParams &params, const Item &item,
                                           const Softmax &softmax, RowTable &table, u32 warp, u32 lane) {
    softmax.publish();
    group_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
    // A thread for a row: every lane would divide for each of its own.
    if (threadIdx.x < item.num_rows) {
        const u32 row = threadIdx.x;
        table.targets[row] = RowTarget(params, item, item.kv_head, row, softmax.state(row), true);
    }
    group_sync(CONSUMER_BARRIER, CONSUMER_THREADS);
    const LaneOutputs outputs(params, item, softmax, table, warp, lane);
    const FolioAttentionParams &p = params.attention;
    const u32 dtype = item.is_part() ? FOLIO_F32 : params.o_dtype;
    void *base = item.is_part() ? p.plan.partial_o : p.o.data;
    if (dtype == FOLIO_BF16) {
        outputs.store([&](i64 at, float4 x) { store_four(base, FOLIO_BF16, at, x); });
    } else if (dtype == FOLIO_F32) {
        outputs.store([&](i64 at, float4 x) { store_four(base, FOLIO_F32, at, x); });
    } else if (dtype == FOLIO_F16) {
        outputs.store([&](i64 at, float4 x) { store_four(base, FOLIO_F16, at, x); });
    } else if (dtype == FOLIO_E4M3) {
        outputs.store([&](i64 at, float4 x) { store_four(base, FOLIO_E4M3, at, x); });
    } else {
        outputs.store([&](i64 at, float4 x) { store_four(base, FOLIO_E5M2, at, x); });
    }
}

}  // namespace folio::decode
