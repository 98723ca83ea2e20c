// Outputs in fp8, after Hopper's prefill kernel wrote them in fp16 and without the factor of v, so that they are in fp16's
// range whatever that is. Rows go by work items: split ones are the combine kernel's, those of decodes another plan's.
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
    const u32 num_heads = p.num_heads.divisor, num_pieces = p.pieces.divisor,
              num_items = p.plan.counts[FOLIO_COUNT_ITEMS];
    if (num_items == 0) return;
    // CTAs that share an item.
    const u32 sharing = (gridDim.x + num_items - 1) / num_items;
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < num_items * sharing; unit += gridDim.x) {
        const FolioWorkItem &item = p.plan.items[unit / sharing];
        const u32 first_token = item.q_token;
        if (item.partial != FOLIO_NO_PARTIAL || first_token >= p.num_tokens) continue;
        const u32 count = min(item.q_len, p.num_tokens - first_token) * num_heads * num_pieces;
        const bool of_requests = p.flags & FOLIO_RUN_V_SCALES_OF_REQUESTS;
        const float *const v_scales =
            p.v_scales + (of_requests ? static_cast<i64>(item.request) * (num_heads / p.group_size) : 0);
#pragma unroll 1
        for (u32 index = unit % sharing * FOLIO_THREADS + threadIdx.x; index < count;
             index += sharing * FOLIO_THREADS) {
            const u32 of_item = divide(index, p.pieces), piece = index - of_item * num_pieces;
            const u32 of_tokens = divide(of_item, p.num_heads), head = of_item - of_tokens * num_heads;
            const i64 token = first_token + of_tokens, row = token * num_heads + head;
            const float factor = p.v_scale * head_scale(v_scales, p.v_scales_stride, head / p.group_size) / p.o_scale;
            const uint4 in = static_cast<const uint4 *>(p.rows)[row * p.row_pieces + piece];
            u8 *const o = static_cast<u8 *>(p.o.data) + token * p.o.stride_token + head * p.o.stride_head;
            reinterpret_cast<uint2 *>(o)[piece] =
                make_uint2(round_pairs<Wanted>(in.x, in.y, factor), round_pairs<Wanted>(in.z, in.w, factor));
        }
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
