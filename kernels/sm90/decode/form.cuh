// The form of cache that the decode kernel is compiled for, FOLIO_CACHE_FORM: 0 for rows of plain elements, otherwise a
// FolioForm. What follows from it for queries, scores and outputs; elements are tile.cuh's.
//
// Scales stay out of the products: those of a token multiply its scores and its probability, those of a channel the query and
// the output. Those of a block of a token's elements multiply these.
#pragma once

#include "params/stored_decode.h"
#include "ptx/types.cuh"

namespace folio::decode {

constexpr u32 FORM = FOLIO_CACHE_FORM;
constexpr bool STORED = FORM != 0;
constexpr bool TOKEN_SCALES = FORM == FOLIO_FORM_TOKEN_HEAD_SCALES;
constexpr bool ZERO_POINTS = FORM == FOLIO_FORM_CHANNEL_ZERO_POINTS;
constexpr bool BLOCK_SCALES = FORM == FOLIO_FORM_NVFP4;
constexpr bool CHANNEL_SCALES = ZERO_POINTS || FORM == FOLIO_FORM_CHANNEL_SCALES;
// A query times the scales of its channels is the sum of two fp16 numbers: one would lose what q's type holds.
constexpr int QUERY_PARTS = CHANNEL_SCALES ? 2 : 1;
// Elements that share a scale.
constexpr int SCALE_BLOCK = 16;
// What elements are multiplied as, counted in what they are: 2^-UNIT_LOG2 (block_elements.cuh).
constexpr u32 UNIT_LOG2 = BLOCK_SCALES ? 14 : 0;
constexpr float VALUE_UNITS = 1 << UNIT_LOG2;

template <bool IS_STORED>
struct ParamsOf {
    typedef FolioPaddedDecodeParams Type;
};
template <>
struct ParamsOf<true> {
    typedef FolioStoredDecodeParams Type;
};
// Of the kernel.
typedef ParamsOf<STORED>::Type Params;

// The same for code that only such forms run, from where all forms share it.
__device__ __forceinline__ const FolioStoredDecodeParams &stored_params(const FolioPaddedDecodeParams &params) {
    return static_cast<const FolioStoredDecodeParams &>(params);
}

}  // namespace folio::decode
