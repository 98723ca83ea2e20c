// Units of work: which rows and keys a CTA has, as every warp of it works them out for itself. Index arithmetic only.
#pragma once

#include "core/mask.cuh"
#include "core/paged.cuh"
#include "params/mla_few.h"
#include "sm90/mla_few/format.cuh"

namespace folio::mla_few {

// A work item, which has no more rows than a tile: problems with more are other kernels'. Rows are (token, head) pairs:
// row = token * num_heads + head.
struct Unit {
    FolioWorkItem work;
    u32 num_rows;
};

__device__ __forceinline__ Unit read_unit(const FolioMlaFewParams &params, u32 index) {
    const FolioAttentionParams &p = params.mla.attention;
    const uint4 *words = reinterpret_cast<const uint4 *>(p.plan.items + index);
    const uint4 a = words[0], b = words[1], c = words[2];
    Unit unit;
    unit.work = {a.x,
                 a.y,
                 a.z,
                 a.w,
                 b.x,
                 b.y,
                 b.z,
                 b.w,
                 static_cast<i64>(static_cast<u64>(c.y) << 32 | c.x),
                 static_cast<i32>(c.z),
                 static_cast<i32>(c.w)};
    const u32 rows = existing_rows(p, unit.work.q_token, unit.work.q_len) * p.num_qo_heads;
    unit.num_rows = min(rows, static_cast<u32>(ROWS));
    return unit;
}

// Calls `work` for the CTA's units, in an order that all of its warps have in common. Items are sorted, the largest
// first: every other round goes backwards, so that a CTA that got a large one gets a small one next.
template <class Work>
__device__ __forceinline__ void for_each_unit(const FolioMlaFewParams &params, Work &&work) {
    // Asked for at once: a unit that the number of units says is not there is one round trip cheaper than to wait for it.
    Unit unit = read_unit(params, blockIdx.x);
    const u32 count = params.mla.attention.plan.counts[FOLIO_COUNT_ITEMS];
    u32 index = blockIdx.x;
    bool backwards = false;
#pragma unroll 1
    for (u32 first = 0; first < count; first += gridDim.x) {
        if (index < count && unit.num_rows > 0) work(unit);
        backwards = !backwards;
        index = first + gridDim.x + (backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        if (index < count) unit = read_unit(params, index);
    }
}

// A row's token within the item, and its head.
struct TokenHead {
    u32 token, head;
};

// Row `row` of the unit; rows past the last repeat the last, and their results are dropped.
__device__ __forceinline__ TokenHead token_head(const FolioMlaFewParams &params, const Unit &unit, u32 row) {
    const u32 existing = min(row, unit.num_rows - 1);
    const u32 token = divide(existing, params.mla.num_heads);
    return {token, existing - token * params.mla.num_heads.divisor};
}

__device__ __forceinline__ KeyRange row_keys(const FolioMlaFewParams &params, const Unit &unit, u32 token) {
    return Window<i64>(params.mla.attention)
        .keys(static_cast<i64>(unit.work.position) + token,
              {static_cast<i32>(unit.work.kv_start), static_cast<i32>(unit.work.kv_end)});
}

// The keys that some row of the unit sees, and the slots that hold them; the first begins with a group of 8 tokens or
// with a slot's number of them, as boxes do.
template <class Format>
struct Span {
    i32 begin, end, first;
    u32 slots;

    __device__ __forceinline__ Span(const FolioMlaFewParams &params, const Unit &unit) {
        begin = row_keys(params, unit, token_head(params, unit, 0).token).begin;
        end = row_keys(params, unit, token_head(params, unit, unit.num_rows - 1).token).end;
        first = begin / Format::SLOT_TOKENS * Format::SLOT_TOKENS;
        slots = end <= begin ? 0 : static_cast<u32>(end - first + Format::SLOT_TOKENS - 1) / Format::SLOT_TOKENS;
    }
};

}  // namespace folio::mla_few
