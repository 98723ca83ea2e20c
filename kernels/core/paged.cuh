// Which page of a cache a key is in, by the page tables. A ragged tensor is a cache of one-token pages whose ids follow
// each other. How the page's rows are stored is cache.cuh's.
#pragma once
#include "core/cache.cuh"

namespace folio {

__device__ __forceinline__ u32 divide(u32 n, const FolioDivisor &d) {
    return (__umulhi(n, d.multiplier) + n) >> d.shift;
}

// A key's page and its place in the page. Page ids and ragged rows are int32.
struct KeySlot {
    i32 page;
    u32 token;
};

// The keys of one request. Page ids are not checked when they are read, so that nothing waits for them then: whoever
// uses a slot asks `holds` first.
struct PageTable {
    const FolioAttentionParams &p;  // page ids and their number stay in constant memory: registers are scarce
    const FolioDivisor &page_size;
    i64 start;

    __device__ __forceinline__ PageTable(const FolioAttentionParams &p, const FolioWorkItem &item,
                                         const FolioDivisor &page_size)
        : p(p), page_size(page_size), start(item.page_start) {}

    __device__ __forceinline__ KeySlot operator[](i32 key) const {
        const u32 index = divide(key, page_size);
        const i64 at = start + index;
        return {p.plan.page_ids ? p.plan.page_ids[at] : static_cast<i32>(at), key - index * page_size.divisor};
    }

    // Whether the cache has the slot's page.
    __device__ __forceinline__ bool holds(const KeySlot &slot) const {
        return static_cast<u32>(slot.page) < p.num_pages;
    }
};

}  // namespace folio
