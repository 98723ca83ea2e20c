// Who widens which keys: a warp takes those of one head in a chunk of the rows that are written, and each lane finds one of
// them. How rows are stored, and what they become, is the kernels'.
#pragma once
#include "core/paged.cuh"
#include "core/requests.cuh"
#include "core/starts.cuh"
#include "params/widen.h"

namespace folio {

constexpr u32 CHUNK = FOLIO_WIDENED_ROWS;  // keys that a warp widens of one head
static_assert(CHUNK == LANES, "a lane finds a key");

// What heads start from whose numbers are to be scaled (FolioWidenParams::units).
constexpr float LEAST_UNIT = 0x1p-115f;

// Keys of a request that the cache has.
__device__ __forceinline__ u32 keys_of(const FolioWidenParams &p, u32 request) {
    const i32 *const starts = p.plan.qo_indptr + request;
    const i32 apart = p.new_keys_apart ? starts[1] - starts[0] : 0;
    return static_cast<u32>(max(p.plan.kv_len[request] - apart, 0));
}

// A lane's key of a chunk: its page and its place there.
struct Key {
    i32 page;  // that of no cache: past the last key
    u32 token;

    __device__ __forceinline__ Key(const FolioWidenParams &p, u32 request, u32 key) : page(-1), token(0) {
        if (key >= keys_of(p, request)) return;
        const u32 index = divide(key, p.page_size);
        const i64 at = p.page_start[request] + index;
        page = p.plan.page_ids ? p.plan.page_ids[at] : static_cast<i32>(at);
        token = key - index * p.page_size.divisor;
    }

    __device__ __forceinline__ bool is_held(const FolioWidenParams &p) const {
        return static_cast<u32>(page) < p.num_pages;
    }

    template <class Stored>
    __device__ __forceinline__ const typename Stored::Storage *row(const FolioWidenParams &p, const FolioCache &cache,
                                                                   u32 head) const {
        return is_held(p) ? CacheRows<Stored>::row(cache, page, token, head) : nullptr;
    }
};

// use(key, head, first_row): a lane's key, and the chunk's first row. All lanes of a warp are there.
template <class Use>
__device__ __forceinline__ void for_each_chunk(const FolioWidenParams &p, const Use &use) {
    const u32 batch_size = p.plan.counts[FOLIO_COUNT_REQUESTS], num_heads = p.num_kv_heads.divisor;
    const u32 num_chunks = min(static_cast<u32>(p.first_row[batch_size]), p.most_rows) / CHUNK;
    const u32 lane = threadIdx.x % LANES, warp = blockIdx.x * WARPS + threadIdx.x / LANES;
#pragma unroll 1
    for (u32 unit = warp; unit < num_chunks * num_heads; unit += gridDim.x * WARPS) {
        const u32 chunk = divide(unit, p.num_kv_heads), head = unit - chunk * num_heads;
        const i64 first_row = static_cast<i64>(chunk) * CHUNK;
        const u32 request = request_of_row([&](u32 b) { return p.first_row[b]; }, batch_size, first_row);
        const u32 first_key = static_cast<u32>(first_row) - p.first_row[request];
        use(Key(p, request, first_key + lane), head, first_row);
    }
}

}  // namespace folio
