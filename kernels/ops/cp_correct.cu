// Scales one rank's output by its share of the softmax over all ranks' keys, so that all ranks' outputs add up. A warp
// takes a row of one head. An lse of -inf, +inf or NaN is that of a rank without keys, whose output is not read.
#include "core/records.cuh"
#include "core/requests.cuh"
#include "core/softmax.cuh"
#include "params/context_parallel.h"

namespace folio {

typedef FolioCpCorrectParams Params;

// A row's statistics over all ranks, in the base of the caller.
struct Shares {
    float max, sum, own;  // own: this rank's term of the sum

    __device__ __forceinline__ Shares(const Params &p, u32 token, u32 head) : max(minus_infinity()), sum(0), own(0) {
        const float *lse = p.lse_all + token * p.lse_stride_token + head * p.lse_stride_head;
        for (u32 rank = 0; rank < p.world_size; rank++) max = fmaxf(max, with_keys(lse[rank * p.lse_stride_rank]));
        if (max == minus_infinity()) return;
        const float to_base_2 = p.flags & FOLIO_RUN_LSE_BASE_2 ? 1.0f : LOG2_E;
        for (u32 rank = 0; rank < p.world_size; rank++) {
            const float term = exp2_approx((with_keys(lse[rank * p.lse_stride_rank]) - max) * to_base_2);
            sum += term;
            if (rank == p.rank) own = term;
        }
    }

    // +inf and NaN as -inf.
    static __device__ __forceinline__ float with_keys(float lse) {
        return lse < __uint_as_float(0x7f800000u) ? lse : minus_infinity();
    }

    __device__ __forceinline__ float share() const { return sum > 0.0f ? own / sum : 0.0f; }
    __device__ __forceinline__ float lse(u32 flags) const {
        return sum > 0.0f ? max + lse_in_base(log2_approx(sum), flags) : minus_infinity();
    }
};

template <class T>
__device__ __forceinline__ void scale(const Params &p, u32 token, u32 head, float share) {
    typedef typename T::Storage Storage;
    const Storage *from = static_cast<const Storage *>(p.o.data) + token * p.o.stride_token + head * p.o.stride_head;
    Storage *to = static_cast<Storage *>(p.o_out.data) + token * p.o_out.stride_token + head * p.o_out.stride_head;
    for (u32 d = VECTOR * (threadIdx.x % WARP); d < p.head_dim; d += VECTOR * WARP) {
        const u32 count = min(VECTOR, p.head_dim - d);
        Piece<T> piece;
        if (share > 0.0f) {
            piece.load(from + d, count, p.vectors);
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) piece.set(i, piece[i] * share);
        } else {
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) piece.set(i, 0.0f);
        }
        piece.store(to + d, count, p.vectors);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_cp_correct(const __grid_constant__ FolioCpCorrectParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 row = blockIdx.x * (FOLIO_THREADS / WARP) + threadIdx.x / WARP;
    if (row >= p.num_rows) return;
    const u32 token = divide(row, p.num_heads), head = row - token * p.num_heads.divisor;
    const Shares shares(p, token, head);
    switch (p.dtype) {
        case FOLIO_F32: scale<f32>(p, token, head, shares.share()); break;
        case FOLIO_F16: scale<f16>(p, token, head, shares.share()); break;
        default: scale<bf16>(p, token, head, shares.share()); break;
    }
    if (p.lse_out && threadIdx.x % WARP == 0) {
        p.lse_out[token * p.lse_out_stride_token + head * p.lse_out_stride_head] = shares.lse(p.flags);
    }
}
