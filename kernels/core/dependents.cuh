// When the kernel behind an attention kernel may start, by what the plan leaves to it.
#pragma once
#include "params/params.h"
#include "ptx/ptx.cuh"

namespace folio {

// A graph has a combine kernel for the splits that there may be. Where no row is split, one CTA of it waits and all others end,
// so that it is over as soon as this kernel is. (Waiting CTAs of many rows on idle multiprocessors slow this kernel down.)
__device__ __forceinline__ void allow_idle_dependents(const FolioPlanView &plan) {
    if (plan.counts[FOLIO_COUNT_COMBINES] == 0) allow_dependents();
}

}  // namespace folio
