// Scales and zero points of channels: where they are.
#pragma once
#include "core/units.cuh"
#include "params/stored.h"

namespace folio {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_WARP, x, distance);
    return x;
}

// Those of a head.
struct Channels {
    const float *scales, *zeros;  // null where the form has none

    __device__ __forceinline__ Channels(const FolioStoredTensor &t, u32 form, u32 head)
        : scales(nullptr), zeros(nullptr) {
        if (form == FOLIO_FORM_CHANNEL_SCALES || form == FOLIO_FORM_CHANNEL_ZERO_POINTS) {
            scales = static_cast<const float *>(t.scales) + head * t.scales_head;
        }
        if (form == FOLIO_FORM_CHANNEL_ZERO_POINTS) zeros = t.zero_points + head * t.zero_points_head;
    }

    // What queries are divided by when they are multiplied by the scales, so that fp16 holds them.
    __device__ __forceinline__ float unit(u32 dim) const {
        if (!scales) return 1.0f;
        float largest = 0.0f;
        for (u32 d = threadIdx.x % 32; d < dim; d += 32) largest = fmaxf(largest, fabsf(scales[d]));
        return power_of_two_above(warp_max(largest));
    }
};

}  // namespace folio
