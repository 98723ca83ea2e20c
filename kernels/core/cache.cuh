// How rows of a cache are stored: the element, the bytes of a row, how scales vary, and where a head's row begins. This
// is all that kernels know of a cache format; which page a key is in is paged.cuh's.
#pragma once
#include "core/dtype.cuh"

namespace folio {

// What one scale covers; a scale for the whole tensor is one per head with stride 0. Scales per head leave the loop
// over keys: that of K goes into the logits' scale, that of V into the output's.
enum class ScaleGranularity { HEAD, TOKEN_HEAD, BLOCK };

// Rows of elements one after another, and nothing beside them.
template <class Element_>
struct CacheRows {
    typedef Element_ Element;
    typedef typename Element::Storage Unit;  // what strides of FolioCache count
    static constexpr ScaleGranularity SCALES = ScaleGranularity::HEAD;

    static constexpr __device__ __forceinline__ u32 row_bytes(u32 dim) { return dim * sizeof(Unit); }

    // A head's row of the first token of the first page.
    static __device__ __forceinline__ Unit *first_row(const FolioCache &cache, u32 head) {
        return static_cast<Unit *>(cache.data) + head * cache.stride_head;
    }

    // From there to the row of token `token` of `page`.
    static __device__ __forceinline__ i64 offset(const FolioCache &cache, i64 page, i64 token) {
        return page * cache.stride_page + token * cache.stride_token;
    }

    static __device__ __forceinline__ Unit *row(const FolioCache &cache, i64 page, i64 token, u32 head) {
        return first_row(cache, head) + offset(cache, page, token);
    }
};

}  // namespace folio
