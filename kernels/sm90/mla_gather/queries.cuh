// Queries in bf16 for keys in fp16: rows that are in shared memory are divided by a power of two each, so that fp16 holds
// their range; the softmax multiplies by it. Other queries stay as they are.
#pragma once

#include "core/bf16_rows.cuh"
#include "sm90/mla_gather/tile.cuh"

namespace folio::mla {

constexpr bool NARROWS = Element::IS_BF16 && !Operand::IS_BF16;
constexpr float LEAST_SCALE = 1.17549435e-38f;  // the least normal number

// A row, of which the lane has a chunk in each atom, the first at `at`. Returns what it was divided by.
__device__ __forceinline__ float narrow_row(u32 at) {
    float4 chunks[LATENT_ATOMS + 1];
    float most = 0.0f;
#pragma unroll
    for (int atom = 0; atom <= LATENT_ATOMS; ++atom) {
        chunks[atom] = ld_shared_f4(at + atom * QUERY_ATOM_BYTES);
        const float4 &c = chunks[atom];
        const float pairs[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
        for (const float pair : pairs) {
            const float2 x = unpack_bf16(__float_as_uint(pair));
            most = fmaxf(most, fmaxf(fabsf(x.x), fabsf(x.y)));
        }
    }
    const float power = power_below<8>(most), factor = inverse_of_power(power);
#pragma unroll
    for (int atom = 0; atom <= LATENT_ATOMS; ++atom) {
        const float4 &c = chunks[atom];
        const float pairs[4] = {c.x, c.y, c.z, c.w};
        u32 narrow[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = unpack_bf16(__float_as_uint(pairs[i]));
            narrow[i] = f16::pack(x.x * factor, x.y * factor);
        }
        st_shared_v4(at + atom * QUERY_ATOM_BYTES, narrow);
    }
    return power;
}

// Each thread of the warpgroup has the chunks that it copied itself.
__device__ __forceinline__ void narrow_queries(Shared &shared, u32 thread) {
    if constexpr (NARROWS) {
#pragma unroll 1
        for (u32 row = thread / 8; row < ROWS; row += 16) {
            const u32 at = shared_address(shared.queries) + row * 128 + ((thread % 8 ^ row % 8) << 4);
            const float power = narrow_row(at);
            if (thread % 8 == 0) shared.powers[row] = power;
        }
    }
}

}  // namespace folio::mla
