// The two products of a step by a warpgroup: scores = k q, 64 keys by all rows, and outputs += v w, the value dimensions by all
// rows. Keys and values are the wide operand of both, widened to fp16 on the way from shared memory to registers: each element
// once, whatever the number of rows. No softmax here.
//
// Warp w multiplies keys 16 w .. 16 w + 15 of every 64, and of all values the 16-byte chunks w * BLOCKS .. of a row. Lane 4 g + i
// holds scores of tokens g and g + 8 of the warp's 16: s[4 t + 2 r + c] is token g + 8 r and row 8 t + 2 i + c. Outputs are alike,
// BLOCKS of them, each 16 dimensions of the warp's.
#pragma once

#include "ptx/wgmma_products.cuh"
#include "sm90/decode_warpgroup/rows.cuh"

namespace folio::decode {

constexpr int SUMS = ROWS / 2, BLOCKS = HEAD_DIM_VO / 64;
static_assert(Op::BITS == 8 && HEAD_DIM_QK % 64 == 0 && BLOCKS * CONSUMERS == VTile::ROW_CHUNKS && BLOCKS <= 2);

// Weights are core matrices of 8 rows by 8 keys, [8 keys][8 rows][row][16 bytes].
constexpr int WEIGHT_KEYS_BYTES = ROW_TILES * 128;

// The warp's scores of a step.
class Scores {
public:
    float s[STEP_TILES][SUMS];

    // `keys` is the address of the step's first row.
    __device__ __forceinline__ void load(u32 keys, u32 warp, u32 lane) {
        const u32 token = 16 * warp + Op::key_row(lane);
        const u32 first = keys + token / 8 * KTile::GROUP_BYTES + KTile::at(token & 7, Op::key_chunk(lane));
#pragma unroll
        for (int tile = 0; tile < STEP_TILES; ++tile) {
#pragma unroll
            for (int at = 0; at < QUERY_STEPS; at += Op::STEPS_PER_PAIR) {
                WideFragment two[Op::STEPS_PER_PAIR];
                Op::load_keys(two, KTile::chunk_pair(first + tile * 8 * KTile::GROUP_BYTES, at / Op::STEPS_PER_PAIR));
#pragma unroll
                for (int i = 0; i < 4 * Op::STEPS_PER_PAIR; ++i) wide[tile][at + i / 4][i % 4] = two[i / 4].r[i % 4];
            }
        }
    }

    __device__ __forceinline__ void begin(u64 queries) {
#pragma unroll
        for (int tile = 0; tile < STEP_TILES; ++tile) renew(s[tile]);
        wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < STEP_TILES; ++tile) {
#pragma unroll
            for (int at = 0; at < QUERY_STEPS; ++at) {
                wgmma_rs<Math>(s[tile], wide[tile][at], queries + (at / 4 * QUERY_ATOM_BYTES + at % 4 * 32) / 16,
                               at > 0);
            }
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void end() {
        wgmma_wait<0>();
#pragma unroll
        for (int tile = 0; tile < STEP_TILES; ++tile) {
            pin(s[tile]);
#pragma unroll
            for (int at = 0; at < QUERY_STEPS; ++at) pin(wide[tile][at]);
        }
    }

private:
    u32 wide[STEP_TILES][QUERY_STEPS][4];
};

// The warp's part of a step's values, in registers.
class Values {
public:
    // `values` is the address of the step's first row.
    __device__ __forceinline__ void load(u32 values, u32 warp, u32 lane) {
        if constexpr (BLOCKS == 1) {
            load_chunks(values, warp, lane);
        } else {
            load_pairs(values, warp, lane);
        }
    }

    // o += values * weights.
    __device__ __forceinline__ void begin_product(float (&o)[BLOCKS][SUMS], u64 weights) const {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) pin(o[b]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEP_TOKENS / 16; ++k) {
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) {
                wgmma_rs<Math>(o[b], wide[k][b], weights + k * 2 * WEIGHT_KEYS_BYTES / 16, 1);
            }
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void end_product(float (&o)[BLOCKS][SUMS]) {
        wgmma_wait<0>();
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) pin(o[b]);
#pragma unroll
        for (int k = 0; k < STEP_TOKENS / 16; ++k) {
#pragma unroll
            for (int b = 0; b < BLOCKS; ++b) pin(wide[k][b]);
        }
    }

    // The first of the two value dimensions that a lane accumulates of a block; the other is the next.
    static __device__ __forceinline__ u32 first_dim(int block, u32 warp, u32 lane) {
        return 16 * (warp * BLOCKS + block) + Op::first_dim(lane / 4);
    }

private:
    // Two chunks of 16 tokens at a time.
    __device__ __forceinline__ void load_pairs(u32 values, u32 warp, u32 lane) {
        const u32 token = Op::value_row(lane);
        const u32 first =
            values + token / 8 * VTile::GROUP_BYTES + VTile::at(token & 7, BLOCKS * warp + Op::value_chunk(lane));
#pragma unroll
        for (int k = 0; k < STEP_TOKENS / 16; ++k) {
            WideFragment two[Op::STEPS_PER_PAIR];
            Op::load_values(two, first + k * 2 * VTile::GROUP_BYTES);
#pragma unroll
            for (int i = 0; i < 4 * BLOCKS; ++i) wide[k][i / 4][i % 4] = two[i / 4].r[i % 4];
        }
    }

    // One chunk of 32 tokens at a time.
    __device__ __forceinline__ void load_chunks(u32 values, u32 warp, u32 lane) {
        const u32 first = values + lane / 8 * VTile::GROUP_BYTES + VTile::at(lane & 7, warp);
#pragma unroll
        for (int k = 0; k < STEP_TOKENS / 16; k += 2) {
            u32 x[4];
            ldmatrix_x4_trans(x, first + k * 2 * VTile::GROUP_BYTES);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                u32(&a)[4] = wide[k + i][0];
                widen<CacheType>(__byte_perm(x[2 * i], x[2 * i + 1], 0x6420), a[0], a[2]);
                widen<CacheType>(__byte_perm(x[2 * i], x[2 * i + 1], 0x7531), a[1], a[3]);
            }
        }
    }

    u32 wide[STEP_TOKENS / 16][BLOCKS][4];
};

}  // namespace folio::decode
