// The same for fp8 records. Outputs lie in registers dim by dim; they pass through the memory of the queries, eight rows at a
// time, where the warpgroups' sums become one, and leave it in neighbouring vectors.
#pragma once

#include "sm90/mla_few/output.cuh"

namespace folio::mla_few {

// A row on its way; four floats of padding spread a warp's stores over the banks.
constexpr u32 OUTPUT_PITCH = LATENT + 4;
static_assert(8 * OUTPUT_PITCH * sizeof(float) <= Memory<Halves<bf16>>::QUERY_BYTES);

template <class T, bool SCALED>
class Output<Bytes<T, SCALED>> {
    using Format = Bytes<T, SCALED>;
    using P = Products<Format>;
    static constexpr u32 THREADS = CONSUMERS * GROUP_THREADS;
    // The barrier of all consumers; 1 and the next are those of the warpgroups.
    static constexpr u32 BARRIER = 1 + CONSUMERS;

public:
    // All consumer warps together. Nobody may read the queries any more after the first barrier in here.
    static __device__ __forceinline__ void store(const FolioMlaFewParams &params, const Unit &unit,
                                                 Softmax<Format> &softmax, Statistics<Format> &shared, u8 *queries,
                                                 u32 group, u32 warp, u32 lane) {
        publish(softmax, shared, group, warp, lane);
        group_sync(BARRIER, THREADS);
        const bool partial = unit.work.partial != FOLIO_NO_PARTIAL;
        float factor[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const u32 row = lane_row(n, lane);
            const RowState state = total(shared, row);
            const float own = exp2_approx(softmax.max[n] - state.max);
            factor[n] =
                state.sum == 0.0f ? 0.0f : __fdividef(own, state.sum) * (partial ? 1.0f : params.mla.attention.v_scale);
            if (group == 0 && warp == 0 && lane < 4 && row < unit.num_rows) store_lse(params, unit, row, state);
        }
        float *staged = reinterpret_cast<float *>(queries);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (u32 g = CONSUMERS; g-- > 0;) {
                if (group == g) stage(softmax, factor, staged, half, g + 1 < CONSUMERS, warp, lane);
                group_sync(BARRIER, THREADS);
            }
            store_rows(params, unit, staged, half);
            group_sync(BARRIER, THREADS);
        }
    }

private:
    // Rows 8 half .. 8 half + 7, beside what another warpgroup has put there where `add`.
    static __device__ __forceinline__ void stage(const Softmax<Format> &softmax, const float (&factor)[4],
                                                 float *staged, int half, bool add, u32 warp, u32 lane) {
#pragma unroll
        for (int j = 0; j < OUTPUT_TILES; ++j) {
            const float scale = Format::SCALED ? softmax.reference[j / 2] : 1.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float *at = staged + (2 * (lane % 4) + i % 2) * OUTPUT_PITCH + P::first_dim(j, warp, lane / 4) +
                            i / 2 * P::DIM_STEP;
                const float x = softmax.o[j][4 * half + i] * (factor[2 * half + i % 2] * scale);
                *at = add ? *at + x : x;
            }
        }
    }

    static __device__ __forceinline__ void store_rows(const FolioMlaFewParams &params, const Unit &unit,
                                                      const float *staged, int half) {
        constexpr u32 PIECES = LATENT / 4;
        const FolioAttentionParams &p = params.mla.attention;
#pragma unroll 2
        for (u32 n = threadIdx.x; n < 8 * PIECES; n += THREADS) {
            const u32 row = 8 * half + n / PIECES, column = n % PIECES * 4;
            if (row >= unit.num_rows) break;
            const float4 x = *reinterpret_cast<const float4 *>(staged + n / PIECES * OUTPUT_PITCH + column);
            const TokenHead at = token_head(params, unit, row);
            if (unit.work.partial != FOLIO_NO_PARTIAL) {
                float *const to = p.plan.partial_o + partial_row(params, unit, at) * LATENT + column;
                *reinterpret_cast<float4 *>(to) = x;
                continue;
            }
            const i64 token = static_cast<i64>(unit.work.q_token) + at.token;
            u16 *const to =
                static_cast<u16 *>(p.o.data) + token * p.o.stride_token + at.head * p.o.stride_head + column;
            *reinterpret_cast<uint2 *>(to) = make_uint2(QueryType::pack(x.x, x.y), QueryType::pack(x.z, x.w));
        }
    }
};

}  // namespace folio::mla_few
