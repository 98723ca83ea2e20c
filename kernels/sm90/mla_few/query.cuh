// The unit's queries in shared memory, as the narrow operand of k q: [atom of 64 elements][row][128 bytes], swizzled.
//
// Beside fp8 records queries are fp16, in the order of elements that Operands of those records have: of 16 elements
// 4 i .. 4 i + 3 stand at 2 i, 2 i + 1, 2 i + 8, 2 i + 9. bf16 rows are divided by a power of two then, so that their
// range is kept; the softmax multiplies by it. The rotary part of fp8_ds_mla stays as it is, bf16 as in the records.
#pragma once

#include "ptx/bulk.cuh"
#include "core/bf16_rows.cuh"
#include "sm90/mla_few/work.cuh"

namespace folio::mla_few {

using QueryType = FOLIO_Q;

template <class Format>
class QueryRows {
    static constexpr bool DIVIDED = Format::FP8 && QueryType::IS_BF16;
    static constexpr u32 WARPS = 4 * CONSUMERS, ROWS_OF_WARP = ROWS / WARPS, LATENT_STEPS = LATENT / 16,
                         ROPE_STEPS = ROPE / 16;
    static_assert(!Format::SCALED || QueryType::IS_BF16, "the rotary part is multiplied as it is stored");

    // 16 elements, in pairs.
    struct Step {
        u32 pairs[8];

        __device__ __forceinline__ void read(const void *from) {
            const uint4 *chunks = static_cast<const uint4 *>(from);
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const uint4 chunk = chunks[half];
                pairs[4 * half] = chunk.x, pairs[4 * half + 1] = chunk.y;
                pairs[4 * half + 2] = chunk.z, pairs[4 * half + 3] = chunk.w;
            }
        }

        __device__ __forceinline__ float largest() const {
            float most = 0.0f;
#pragma unroll
            for (u32 pair : pairs) {
                const float2 x = unpack_bf16(pair);
                most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
            }
            return most;
        }

        __device__ __forceinline__ void narrow(float factor) {
#pragma unroll
            for (u32 &pair : pairs) {
                const float2 x = unpack_bf16(pair);
                pair = f16::pack(x.x * factor, x.y * factor);
            }
        }

        __device__ __forceinline__ void interleave() {
            const Step from = *this;
#pragma unroll
            for (u32 n = 0; n < 8; ++n) pairs[n] = from.pairs[n % 4 * 2 + n / 4];
        }

        __device__ __forceinline__ void store(u32 queries, u32 row, u32 step) const {
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 chunk = 2 * step + half;
                const u32 words[4] = {pairs[4 * half], pairs[4 * half + 1], pairs[4 * half + 2], pairs[4 * half + 3]};
                st_shared_v4(
                    queries + chunk / 8 * Memory<Format>::QUERY_ATOM_BYTES + row * 128 + ((chunk % 8 ^ row % 8) << 4),
                    words);
            }
        }
    };

public:
    // All consumer warps together; the caller synchronises. `powers` gets what the rows were divided by.
    static __device__ __forceinline__ void load(const FolioMlaFewParams &params, const Unit &unit, u32 queries,
                                                float *powers, u32 warp, u32 lane) {
        Step latent[ROWS_OF_WARP], rope[ROWS_OF_WARP];
#pragma unroll
        for (u32 n = 0; n < ROWS_OF_WARP; ++n) {
            latent[n] = rope[n] = {};
            const u32 row = warp * ROWS_OF_WARP + n;
            if (row >= unit.num_rows) continue;
            const TokenHead at = token_head(params, unit, row);
            latent[n].read(element(params.mla.attention.q, unit, at) + 16 * lane);
            if (lane < ROPE_STEPS) rope[n].read(element(params.mla.q_rope, unit, at) + 16 * lane);
        }
#pragma unroll
        for (u32 n = 0; n < ROWS_OF_WARP; ++n) {
            const u32 row = warp * ROWS_OF_WARP + n;
            if constexpr (DIVIDED) {
                const float power = power_below<32>(Format::SCALED ? latent[n].largest()
                                                                   : fmaxf(latent[n].largest(), rope[n].largest()));
                if (lane == 0) powers[row] = power;
                const float inverse = inverse_of_power(power);
                latent[n].narrow(inverse);
                if constexpr (!Format::SCALED) rope[n].narrow(inverse);
            }
            if constexpr (Format::FP8) {
                latent[n].interleave();
                if constexpr (!Format::SCALED) rope[n].interleave();
            }
            latent[n].store(queries, row, lane);
            if (lane < ROPE_STEPS) rope[n].store(queries, row, LATENT_STEPS + lane);
        }
        if (!DIVIDED && threadIdx.x < ROWS) powers[threadIdx.x] = 1.0f;
        fence_proxy_async();
    }

private:
    static __device__ __forceinline__ const u16 *element(const FolioRows &rows, const Unit &unit, const TokenHead &at) {
        const i64 token = static_cast<i64>(unit.work.q_token) + at.token;
        return static_cast<const u16 *>(rows.data) + token * rows.stride_token + at.head * rows.stride_head;
    }
};

}  // namespace folio::mla_few
