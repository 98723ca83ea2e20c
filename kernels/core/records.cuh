// Latent records as kernels move them: in pieces of eight elements of one row.
#pragma once
#include "core/elements.cuh"
#include "core/paged.cuh"
#include "params/mla_cache.h"

namespace folio {

// Latent elements that a scale of an fp8_ds_mla record covers, and the pieces of them.
constexpr u32 SCALE_BLOCK = 128, PIECES_OF_BLOCK = SCALE_BLOCK / VECTOR;

// Where a token's record is. A cache may have more pages than int32 can count.
struct RecordSlot {
    i64 page;
    u32 token;

    __device__ __forceinline__ RecordSlot(i64 index, const FolioDivisor &page_size) {
        if (index < 1ll << 31) {
            page = divide(static_cast<u32>(index), page_size);
            token = static_cast<u32>(index) - static_cast<u32>(page) * page_size.divisor;
        } else {
            page = index / page_size.divisor;
            token = static_cast<u32>(index % page_size.divisor);
        }
    }
};

// A row of one part of a record.
template <class T>
__device__ __forceinline__ typename T::Storage *record_row(const FolioCache &part, const RecordSlot &slot) {
    return CacheRows<T>::row(part, slot.page, slot.token, 0);
}

}  // namespace folio
