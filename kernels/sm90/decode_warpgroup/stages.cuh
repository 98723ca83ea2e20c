// The steps of decode_warpgroup's keys in shared memory, who fills them and who frees them, and which keys of an item they have.
#pragma once

#include "core/cache.cuh"
#include "ptx/bulk.cuh"
#include "sm90/decode/span.cuh"

namespace folio::decode {

// A warpgroup multiplies, and another one brings keys.
constexpr u32 CONSUMERS = 4, CONSUMER_THREADS = 32 * CONSUMERS, CONSUMER_BARRIER = 1, PRODUCERS = 4;
static_assert(THREADS == CONSUMER_THREADS + 32 * PRODUCERS && HEADS == 1 && !STORED);

// Keys of a step: so many of the wide operand's 64.
constexpr int STEP_TOKENS = FOLIO_KV_TILE, STEP_TILES = STEP_TOKENS / 64;
using Cache = RowsOf<CacheType>::Type;
using KTile = RowTile<Cache::row_bytes(HEAD_DIM_QK), STEP_TOKENS>;
using VTile = RowTile<Cache::row_bytes(HEAD_DIM_VO), STEP_TOKENS>;
constexpr int K_BYTES = STEP_TOKENS * Cache::row_bytes(HEAD_DIM_QK),
              V_BYTES = STEP_TOKENS * Cache::row_bytes(HEAD_DIM_VO);
constexpr int STAGE_BYTES = K_BYTES + V_BYTES;

// Beside the stages: queries, two sets of weights, maxima and sums of rows, and what is known of a row.
constexpr int QUERY_BYTES = ROWS * HEAD_DIM_QK * 2, WEIGHT_BYTES = ROWS * STEP_TOKENS * 2;
constexpr int ROW_FACTS_BYTES = 36, STATISTICS_BYTES = CONSUMERS * ROWS * 8;
constexpr int BYTES_BESIDE_STAGES = QUERY_BYTES + 2 * WEIGHT_BYTES + STATISTICS_BYTES + ROWS * ROW_FACTS_BYTES;
constexpr int MOST_STAGE_BYTES = 96 * 1024, FREE_BYTES = BLOCK_BYTES - 256 - BYTES_BESIDE_STAGES;
constexpr int STAGES = (FREE_BYTES < MOST_STAGE_BYTES ? FREE_BYTES : MOST_STAGE_BYTES) / STAGE_BYTES;
static_assert(STAGES >= 2 && STAGES * 16 <= 256);

// A stage's place in the ring, and how often the ring went round.
struct Stage {
    u32 index = 0, parity = 0;

    __device__ __forceinline__ void advance() {
        if (++index == STAGES) index = 0, parity ^= 1;
    }
};

// In shared memory: a pair of barriers for each stage.
struct Stages {
    u32 first, barriers;

    __device__ __forceinline__ u32 keys(const Stage &stage) const { return first + stage.index * STAGE_BYTES; }
    __device__ __forceinline__ u32 full(const Stage &stage) const { return barriers + 8 * stage.index; }
    __device__ __forceinline__ u32 empty(const Stage &stage) const { return barriers + 8 * (STAGES + stage.index); }
};

// The keys of an item in steps. The first begins where a box does.
struct StepSpan {
    KeyRange some, all;   // keys that any row sees, and those that all rows see
    const i32 *page_ids;  // of the request
    i32 first, steps;

    __device__ __forceinline__ StepSpan(const FolioPaddedDecodeParams &params, const Item &item) {
        const RowsSpan seen(params, item);
        some = seen.some;
        all = seen.all;
        page_ids = params.attention.plan.page_ids + item.work.page_start;
        const i32 box_tokens = STEP_TOKENS >> params.boxes_log2;
        first = some.begin & -box_tokens;
        steps = some.end <= some.begin ? 0 : (some.end - first + STEP_TOKENS - 1) / STEP_TOKENS;
    }
};

}  // namespace folio::decode
