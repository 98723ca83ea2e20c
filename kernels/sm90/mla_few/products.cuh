// The two products of a tile by a consumer warpgroup: scores = k q, 64 tokens by 16 rows, and outputs += v w, 512 dims by
// 16 rows. Records are the wide operand of both, so that few rows leave no part of an instruction empty but their own.
// No softmax here.
//
// 16-bit records are both operands where they lie. fp8 records become fp16 in registers, twice: a fragment of keys is
// none of values. Lane 4 g + i of warp w holds scores of tokens 16 w + g and 16 w + g + 8, and of rows 2 i, 2 i + 1,
// 2 i + 8, 2 i + 9: s[4 j + 2 r + c] is token + 8 r, row 8 j + 2 i + c. Outputs are eight tiles of 64 dims, alike.
#pragma once

#include "ptx/wgmma_products.cuh"
#include "sm90/decode/tile.cuh"
#include "sm90/mla_few/load.cuh"

namespace folio::mla_few {

constexpr int OUTPUT_TILES = LATENT / 64;

// Where the tile of a warpgroup is: some of 64 tokens, whose records all lie within the ring. The others are any.
struct TileView {
    u32 first, second;  // shared addresses of the 64 tokens, and of the last 32 (fp8)
    u32 begin, end;     // the tile, in steps of 16 tokens
};

// Per row (a lane's four), and per token and block of fp8_ds_mla (a lane's two): what products are multiplied by.
struct Scales {
    float latent[4], rope[4];
    float4 token[2];
};

// The narrow operand of 64 k elements `atom`, from k step `step` of 16 on.
template <class Format>
__device__ __forceinline__ u64 query_step(u64 queries, int step) {
    return queries + (step / 4 * Memory<Format>::QUERY_ATOM_BYTES + step % 4 * 32) / 16;
}

template <class Format>
struct Products {
    // Nothing orders even and odd steps: two sums halve what waits for the instruction before.
    static __device__ __forceinline__ void scores(float (&s)[8], const TileView &tile, u32 query_rows,
                                                  const Scales &scales, u32, u32) {
        using T = typename Format::Math;
        const u64 keys = wgmma_descriptor(tile.first, 16, Format::GROUP_BYTES);
        const u64 queries = wgmma_descriptor(query_rows, 16, 1024);
        float odd[8];
        renew(s);
        renew(odd);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < (LATENT + ROPE) / 16; ++step) {
            const u64 a = keys + (step / 4 * Format::ATOM_BYTES + step % 4 * 32) / 16;
            wgmma_ss<T>(step % 2 ? odd : s, a, query_step<Format>(queries, step), step >= 2);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        pin(odd);
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = (s[i] + odd[i]) * scales.latent[i / 4 * 2 + i % 2];
    }

    static __device__ __forceinline__ void add_values(float (&o)[OUTPUT_TILES][8], const TileView &tile,
                                                      u32 weight_tile, u32, u32) {
        using T = typename Format::Math;
        u64 values = wgmma_descriptor(tile.first + tile.begin * 2 * Format::GROUP_BYTES, Format::ATOM_BYTES,
                                      Format::GROUP_BYTES);
        u64 weights = wgmma_plain_descriptor(weight_tile + tile.begin * 512, 256, 128);
#pragma unroll
        for (int j = 0; j < OUTPUT_TILES; ++j) pin(o[j]);
#pragma unroll 1
        for (u32 step = tile.begin; step < tile.end; ++step) {
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < OUTPUT_TILES; ++j) {
                wgmma_ss<T, Major::WIDTH>(o[j], values + j * Format::ATOM_BYTES / 16, weights, 1);
            }
            wgmma_commit();
            values += 2 * Format::GROUP_BYTES / 16;
            weights += 512 / 16;
        }
        wgmma_wait<0>();
#pragma unroll
        for (int j = 0; j < OUTPUT_TILES; ++j) pin(o[j]);
    }

    // The dim of tile j that a lane's accumulators with r = 0 are of, and the distance to those with r = 1.
    static __device__ __forceinline__ u32 first_dim(int j, u32 warp, u32 g) { return tile_dim(j) + 16 * warp + g; }
    static __device__ constexpr u32 tile_dim(int j) { return 64 * j; }
    static constexpr u32 DIM_STEP = 8;
};

template <class T, bool SCALED>
struct Products<Bytes<T, SCALED>> {
    using Format = Bytes<T, SCALED>;
    using Op = decode::Operands<T>;

    // Eight k steps (two of them a pair of 16-byte chunks) are converted while the eight before are multiplied.
    static __device__ __forceinline__ void scores(float (&s)[8], const TileView &tile, u32 query_rows,
                                                  const Scales &scales, u32 warp, u32 lane) {
        constexpr int SUMS = SCALED ? BLOCKS + 1 : 2;
        const u32 record = (warp < 2 ? tile.first : tile.second) + (warp % 2 * 16 + Op::key_row(lane)) * Format::PITCH +
                           Op::key_chunk(lane) * 16;
        const u64 queries = wgmma_descriptor(query_rows, 16, 1024);
        float sum[SUMS][8];
        u32 a[2][8][4];
#pragma unroll
        for (int n = 0; n < SUMS; ++n) renew(sum[n]);
#pragma unroll
        for (int b = 0; b <= BLOCKS; ++b) {
            constexpr int ROPE_STEPS = ROPE / 16;
            const bool raw = SCALED && b == BLOCKS;
            const int steps = b < BLOCKS ? 8 : ROPE_STEPS;
            if (b >= 2) wgmma_wait<1>();
#pragma unroll
            for (int n = 0; n < steps; n += 2) {
                if (raw) {
                    ldmatrix_x4(a[b % 2][n], record + Format::ROPE_BEGIN + 32 * n);
                    ldmatrix_x4(a[b % 2][n + 1], record + Format::ROPE_BEGIN + 32 * n + 32);
                } else {
                    decode::WideFragment pair[2];
                    Op::load_keys(pair, record + BLOCK * b + 16 * n);
#pragma unroll
                    for (int i = 0; i < 8; ++i) a[b % 2][n + i / 4][i % 4] = pair[i / 4].r[i % 4];
                }
            }
            wgmma_fence();
#pragma unroll
            for (int n = 0; n < steps; ++n) {
                float(&d)[8] = sum[SCALED ? b : b % 2];
                const u64 q = query_step<Format>(queries, 8 * b + n);
                const int accumulate = SCALED ? n > 0 : b >= 2 || n > 0;
                if (raw) {
                    wgmma_rs<bf16>(d, a[b % 2][n], q, accumulate);
                } else {
                    wgmma_rs<f16>(d, a[b % 2][n], q, accumulate);
                }
            }
            wgmma_commit();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < SUMS; ++n) pin(sum[n]);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int row = i / 4 * 2 + i % 2;
            if constexpr (SCALED) {
                const float4 &scale = scales.token[i / 2 % 2];
                const float latent =
                    scale.x * sum[0][i] + scale.y * sum[1][i] + scale.z * sum[2][i] + scale.w * sum[3][i];
                s[i] = latent * scales.latent[row] + sum[4][i] * scales.rope[row];
            } else {
                s[i] = (sum[0][i] + sum[1][i]) * scales.latent[row];
            }
        }
    }

    static __device__ __forceinline__ void add_values(float (&o)[OUTPUT_TILES][8], const TileView &tile,
                                                      u32 weight_tile, u32 warp, u32 lane) {
        u64 weights = wgmma_plain_descriptor(weight_tile, 256, 128);
        const u32 record = Op::value_row(lane) * Format::PITCH + (2 * warp + Op::value_chunk(lane)) * 16;
        u32 even[OUTPUT_TILES][4], odd[OUTPUT_TILES][4];
#pragma unroll
        for (int j = 0; j < OUTPUT_TILES; ++j) pin(o[j]);
#pragma unroll 1
        for (u32 step = 0; step < tile.end; step += 2) {
            const u32 slot = (step == 0 ? tile.first : tile.second) + record;
            load(even, slot);
            multiply(o, even, weights);
            load(odd, slot + 16 * Format::PITCH);
            multiply(o, odd, weights + 512 / 16);
            wgmma_wait<0>();
            weights += 1024 / 16;
        }
#pragma unroll
        for (int j = 0; j < OUTPUT_TILES; ++j) pin(o[j]);
    }

    // Chunks 2 warp and 2 warp + 1 of each block of 128 dims, the one in tile 2 b, the other in tile 2 b + 1; even dims
    // of a chunk are the first eight rows.
    static __device__ __forceinline__ u32 first_dim(int j, u32 warp, u32 g) {
        return BLOCK * (j / 2) + 32 * warp + 16 * (j % 2) + Op::first_dim(g);
    }
    static constexpr u32 DIM_STEP = Op::DIM_STEP;

private:
    static __device__ __forceinline__ void load(u32 (&a)[OUTPUT_TILES][4], u32 address) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            decode::WideFragment pair[2];
            Op::load_values(pair, address + BLOCK * b);
#pragma unroll
            for (int i = 0; i < 8; ++i) a[2 * b + i / 4][i % 4] = pair[i / 4].r[i % 4];
        }
    }

    static __device__ __forceinline__ void multiply(float (&o)[OUTPUT_TILES][8], const u32 (&a)[OUTPUT_TILES][4],
                                                    u64 weights) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < OUTPUT_TILES; ++j) {
            const u64 of_block = SCALED ? weights + j / 2 * Memory<Format>::WEIGHT_BYTES / 16 : weights;
            wgmma_rs<f16>(o[j], a[j], of_block, 1);
        }
        wgmma_commit();
    }
};

}  // namespace folio::mla_few
