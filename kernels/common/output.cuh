// Stores of finished output: four neighbouring elements of a row in the type that the caller asked for.
#pragma once

#include "common/warp_mma.cuh"
#include "params.h"

namespace folio {

template <class T>
__device__ __forceinline__ void store4_fp8(void *row, unsigned column, float4 x) {
    const unsigned bits = pack2_fp8<T>(x.x, x.y) | static_cast<unsigned>(pack2_fp8<T>(x.z, x.w)) << 16;
    *reinterpret_cast<unsigned *>(static_cast<char *>(row) + column) = bits;
}

template <class T>
__device__ __forceinline__ void store4_half(void *row, unsigned column, float4 x) {
    *reinterpret_cast<uint2 *>(static_cast<char *>(row) + 2 * column) =
        make_uint2(pack2<T>(x.x, x.y), pack2<T>(x.z, x.w));
}

__device__ __forceinline__ unsigned output_bytes(unsigned output_type) {
    return output_type == FOLIO_OUTPUT_F32 ? 4 : output_type <= FOLIO_OUTPUT_F16 ? 2 : 1;
}

// Row of `o` for a query token and head.
__device__ __forceinline__ void *output_row(const FolioRows &o, unsigned output_type, folio_i64 token,
                                            unsigned head) {
    const folio_i64 element = token * o.stride_token + head * o.stride_head;
    return static_cast<char *>(o.data) + element * output_bytes(output_type);
}

// `column` is a multiple of four.
__device__ __forceinline__ void store_output4(void *row, unsigned output_type, unsigned column, float4 x) {
    switch (output_type) {
        case FOLIO_OUTPUT_BF16: store4_half<Bf16>(row, column, x); break;
        case FOLIO_OUTPUT_F16: store4_half<F16>(row, column, x); break;
        case FOLIO_OUTPUT_E4M3: store4_fp8<E4m3>(row, column, x); break;
        case FOLIO_OUTPUT_E5M2: store4_fp8<E5m2>(row, column, x); break;
        default: *reinterpret_cast<float4 *>(static_cast<float *>(row) + column) = x;
    }
}

__device__ __forceinline__ float4 scaled(float4 x, float f) {
    return make_float4(x.x * f, x.y * f, x.z * f, x.w * f);
}

__device__ __forceinline__ float4 multiply_add(float f, float4 x, float4 y) {
    return make_float4(f * x.x + y.x, f * x.y + y.y, f * x.z + y.z, f * x.w + y.w);
}

// What a finished row is multiplied by: the value scales, and 1 / o_scale for an fp8 output.
__device__ __forceinline__ float output_scale(const FolioAttentionParams &params, unsigned output_type,
                                              unsigned kv_head) {
    float scale = params.v_scale;
    if (params.v_scales) {
        scale *= params.v_scales[static_cast<folio_i64>(kv_head) * params.v_scales_stride];
    }
    return output_type >= FOLIO_OUTPUT_E4M3 ? scale / params.o_scale : scale;
}

// A softmax sum relative to 2^peak, with the sink taken in. Sums of nothing have peak = -inf or total = 0.
struct SoftmaxTotal {
    float peak, total;

    __device__ __forceinline__ float base2_lse() const { return total == 0.f ? -kInfinity : peak + log2_approx(total); }
};

__device__ __forceinline__ void store_lse(const FolioAttentionParams &params, folio_i64 token, unsigned head,
                                          SoftmaxTotal total) {
    constexpr float kLn2 = 0.6931471805599453f;
    const float unit = params.flags & FOLIO_RUN_LSE_BASE_2 ? 1.f : kLn2;
    params.lse[token * params.lse_stride_token + head * params.lse_stride_head] = total.base2_lse() * unit;
}

// Adds one logit (base 2) that has no value behind it; `rescale` is what the values so far are multiplied by.
__device__ __forceinline__ SoftmaxTotal add_sink(SoftmaxTotal sum, float sink, float &rescale) {
    if (sum.total == 0.f) {
        rescale = 0.f;
        return {sink, sink == -kInfinity ? 0.f : 1.f};
    }
    const float peak = fmaxf(sum.peak, sink);
    rescale = exp2_approx(sum.peak - peak);
    return {peak, sum.total * rescale + exp2_approx(sink - peak)};
}

}  // namespace folio
