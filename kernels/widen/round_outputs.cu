// Outputs in fp8, after Hopper's prefill kernel wrote them in fp16 and without the factor of v, so that they are in fp16's
// range whatever that is. Rows that were split are rounded too, for nothing: the combine kernel writes them afterwards.
#include "core/cache.cuh"
#include "core/paged.cuh"
#include "core/softmax.cuh"
#include "params/widen.h"

namespace folio {

typedef FolioRoundOutputsParams Params;

template <class Wanted>
__device__ __forceinline__ u32 round_pairs(u32 first, u32 second, float factor) {
    const u16 halves[4] = {static_cast<u16>(first), static_cast<u16>(first >> 16), static_cast<u16>(second),
                           static_cast<u16>(second >> 16)};
    u32 bytes = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) bytes |= static_cast<u32>(Wanted::store(f16::load(halves[i]) * factor)) << 8 * i;
    return bytes;
}

template <class Wanted>
__device__ __forceinline__ void round_outputs(const Params &p) {
    const u32 num_heads = p.num_heads.divisor, num_pieces = p.pieces.divisor;
    const u32 num_tokens = min(static_cast<u32>(p.plan.qo_indptr[p.plan.counts[2]]), p.num_tokens);
    const u32 count = num_tokens * num_heads * num_pieces;
#pragma unroll 1
    for (u32 index = blockIdx.x * FOLIO_THREADS + threadIdx.x; index < count; index += gridDim.x * FOLIO_THREADS) {
        const u32 row = divide(index, p.pieces), piece = index - row * num_pieces;
        const u32 token = divide(row, p.num_heads), head = row - token * num_heads;
        const float factor = p.v_scale * head_scale(p.v_scales, p.v_scales_stride, head / p.group_size) / p.o_scale;
        const uint4 in = static_cast<const uint4 *>(p.rows)[static_cast<i64>(row) * p.row_pieces + piece];
        u8 *const o = static_cast<u8 *>(p.o.data) + token * p.o.stride_token + head * p.o.stride_head;
        reinterpret_cast<uint2 *>(o)[piece] =
            make_uint2(round_pairs<Wanted>(in.x, in.y, factor), round_pairs<Wanted>(in.z, in.w, factor));
    }
}

}  // namespace folio

// Grid: any number of CTAs.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_round_outputs(const __grid_constant__ FolioRoundOutputsParams p) {
    using namespace folio;
    if (p.o_dtype == FOLIO_E4M3) {
        round_outputs<e4m3>(p);
    } else {
        round_outputs<e5m2>(p);
    }
}
