// Whose keys the steps of a prefill tile are of.
#pragma once

#include "ptx/types.cuh"

namespace folio::prefill {

template <bool OWN_KEYS>
struct TileKeys;

// Every step is of all warpgroups.
template <>
struct TileKeys<false> {
    static constexpr u32 key_sets = 1;
};

// Where there is more than one set of keys, the first warpgroups have one each: a stage of every step is the first one's,
// the next stage the second one's, and so on. The others have no rows.
template <>
struct TileKeys<true> {
    u32 key_sets;
};

}  // namespace folio::prefill
