// Which page of a cache a key is in, by the page tables. A ragged tensor is a cache of one-token pages whose ids follow
// each other. How the page's rows are stored is cache.cuh's.
#pragma once
#include "core/cache.cuh"

namespace folio {

__device__ __forceinline__ u32 divide(u32 n, const FolioDivisor &d) {
    return (__umulhi(n, d.multiplier) + n) >> d.shift;
}

// A key's page and its place in the page.
struct Slot {
    i64 page;
    u32 token;
};

// The keys of one request. Page ids are not checked when they are read, so that nothing waits for them then: whoever
// uses a slot asks `holds` first.
struct PageTable {
    const i32 *ids;
    i64 start;
    u32 num_pages;
    FolioDivisor page_size;

    __device__ __forceinline__ PageTable(const FolioAttentionParams &p, const FolioWorkItem &item,
                                         const FolioDivisor &page_size)
        : ids(p.plan.page_ids ? p.plan.page_ids + item.page_start : nullptr),
          start(item.page_start),
          num_pages(p.num_pages),
          page_size(page_size) {}

    __device__ __forceinline__ Slot operator[](i32 key) const {
        const u32 index = divide(key, page_size);
        return {ids ? ids[index] : start + index, key - index * page_size.divisor};
    }

    // Whether the cache has the slot's page.
    __device__ __forceinline__ bool holds(const Slot &slot) const { return static_cast<u64>(slot.page) < num_pages; }
};

}  // namespace folio
