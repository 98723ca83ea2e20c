// Factors of whole rows of q, k and v: one for all KV heads, one each, or one for each KV head of each request. Those that
// vary within a head are stored.cuh's.
#pragma once
#include "core/dtype.cuh"

namespace folio {

// Factor of a KV head from one or num_kv_heads scales, or none.
__device__ __forceinline__ float head_scale(const float *scales, i32 stride, u32 kv_head) {
    return scales ? scales[static_cast<i64>(stride) * kv_head] : 1.0f;
}

// The same where `flag` says of a run that each request has scales of its own.
__device__ __forceinline__ float request_scale(const FolioAttentionParams &p, FolioRunFlag flag, const float *scales,
                                               i32 stride, u32 kv_head, u32 request) {
    const i64 first = p.flags & flag ? static_cast<i64>(request) * p.num_kv_heads : 0;
    return scales ? scales[first + static_cast<i64>(stride) * kv_head] : 1.0f;
}

// What q . k of a KV head is multiplied by, in base e. Kernels that take no scales of requests name no request.
__device__ __forceinline__ float product_scale(const FolioAttentionParams &p, u32 kv_head, u32 request = 0) {
    return p.logits_scale *
           request_scale(p, FOLIO_RUN_K_SCALES_OF_REQUESTS, p.k_scales, p.k_scales_stride, kv_head, request);
}

// Factor of the values of a KV head from v_scales.
__device__ __forceinline__ float value_scale(const FolioAttentionParams &p, u32 kv_head, u32 request) {
    return request_scale(p, FOLIO_RUN_V_SCALES_OF_REQUESTS, p.v_scales, p.v_scales_stride, kv_head, request);
}

// What of it multiplies the parts of a row whose keys were split: scales of requests, since parts are combined without
// knowing whose they are.
__device__ __forceinline__ float part_scale(const FolioAttentionParams &p, u32 kv_head, u32 request) {
    return p.flags & FOLIO_RUN_V_SCALES_OF_REQUESTS ? value_scale(p, kv_head, request) : 1.0f;
}

}  // namespace folio
