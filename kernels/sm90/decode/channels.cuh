// What a form with scales of channels makes of outputs: weighted sums of codes become weighted sums of values. Keys' scales are
// the query's (stored_query.cuh). Forms without them do not use this.
#pragma once

#include "sm90/decode/work.cuh"

namespace folio::decode {

// Columns column .. column + 3 of a KV head, of whose weights `weights` is the sum.
__device__ __forceinline__ float4 channel_values(const FolioStoredTensor &v, u32 kv_head, u32 column, float4 sum,
                                                 float weights) {
    const float *scales = static_cast<const float *>(v.scales) + kv_head * v.scales_head + column;
    if constexpr (ZERO_POINTS) {
        const float *zeros = v.zero_points + kv_head * v.zero_points_head + column;
        sum.x -= zeros[0] * weights;
        sum.y -= zeros[1] * weights;
        sum.z -= zeros[2] * weights;
        sum.w -= zeros[3] * weights;
    }
    return make_float4(sum.x * scales[0], sum.y * scales[1], sum.z * scales[2], sum.w * scales[3]);
}

}  // namespace folio::decode
