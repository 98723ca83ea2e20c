// Keys in tensors of their own that the request of a prefill tile has in front of its other keys (FolioPrefillParams). The first
// steps are theirs, in whole steps: of the last one the keys from their end on are none. Index arithmetic only.
#pragma once

#include "params/prefill.h"

namespace folio::prefill {

template <bool AFTER, int BLOCK>
struct TileContext;

// There are none.
template <int BLOCK>
struct TileContext<false, BLOCK> {
    static constexpr int context_len = 0, context_row = 0;

    // The first of the request's ragged keys, or of its page ids.
    __device__ __forceinline__ i64 place(const FolioPrefillParams &, const FolioWorkItem &item) {
        return item.page_start;
    }

    __device__ __forceinline__ int end_in(int, int kv_end) const { return kv_end; }
};

template <int BLOCK>
struct TileContext<true, BLOCK> {
    int context_len, context_row;
    int context_end;  // the block that has keys of the context and, behind them, none; or -1

    __device__ __forceinline__ i64 place(const FolioPrefillParams &params, const FolioWorkItem &item) {
        context_len = context_row = 0, context_end = -1;
        if (params.context_indptr == nullptr) return item.page_start;
        context_row = params.context_indptr[item.request];
        context_len = params.context_indptr[item.request + 1] - context_row;
        if (context_len % BLOCK != 0) context_end = context_len / BLOCK;
        return params.attention.plan.qo_indptr[item.request];
    }

    // Where the keys of a block end at the latest.
    __device__ __forceinline__ int end_in(int block, int kv_end) const {
        return block == context_end ? min(kv_end, context_len) : kv_end;
    }
};

// That block, as a copy; -1: none.
template <bool AFTER>
struct ContextEnd;

template <>
struct ContextEnd<false> {
    ContextEnd() = default;
    template <class Tile>
    __device__ __forceinline__ explicit ContextEnd(const Tile &) {}
    __device__ __forceinline__ int block() const { return -1; }
};

template <>
struct ContextEnd<true> {
    int end = -1;

    ContextEnd() = default;
    template <class Tile>
    __device__ __forceinline__ explicit ContextEnd(const Tile &tile) : end(tile.context_end) {}
    __device__ __forceinline__ int block() const { return end; }
};

}  // namespace folio::prefill
