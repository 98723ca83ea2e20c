// Products per head on any device: out[t, h] = x[t, h] weight[h], for any strides. A CTA computes 64 tokens by 64 columns;
// each of its four warps 32 by 32. Steps of 32 along the depth come by cp.async where rows are aligned, through
// registers where they are not.
#include "core/tile.cuh"
#include "params/projection.h"

namespace folio::projection {

typedef FOLIO_Q Element;

constexpr u32 TOKENS = 64, COLUMNS = 64, DEPTH = 32, STAGES = 4;
// Elements of a 16-byte piece of a tile.
constexpr u32 PIECE = 8;

// x and a depth-first weight are rows of DEPTH elements, a columns-first one of COLUMNS.
typedef TileRow<DEPTH * 2> DepthRow;
typedef TileRow<COLUMNS * 2> ColumnRow;
constexpr u32 X_BYTES = TOKENS * DEPTH * 2, STAGE_BYTES = X_BYTES + DEPTH * COLUMNS * 2;

struct Tile {
    u32 token, column, head;
};

// The token block varies fastest, so that CTAs that share a weight run together.
__device__ __forceinline__ Tile tile_of_block(const FolioProjectionParams &p) {
    const u32 token_blocks = (p.num_tokens - 1) / TOKENS + 1, column_blocks = (p.columns - 1) / COLUMNS + 1;
    const u32 rest = blockIdx.x / token_blocks;
    return {blockIdx.x % token_blocks * TOKENS, rest % column_blocks * COLUMNS, rest / column_blocks};
}

// Eight elements, `stride` apart, or zeros.
__device__ __forceinline__ void copy_elements(u32 target, const u16 *source, i64 stride, bool exists) {
    u32 words[4] = {};
    if (exists) {
#pragma unroll
        for (u32 i = 0; i < PIECE; ++i) words[i / 2] |= static_cast<u32>(source[i * stride]) << 16 * (i % 2);
    }
    st_shared_v4(target, words);
}

__device__ __forceinline__ void copy_piece(u32 target, const u16 *source, i64 stride, bool exists, bool vectors) {
    if (vectors) {
        cp_async<16>(target, source, exists ? 16 : 0);
    } else {
        copy_elements(target, source, stride, exists);
    }
}

__device__ __forceinline__ void load_x(const FolioProjectionParams &p, const Tile &tile, u32 depth, u32 target) {
    constexpr u32 PIECES = DEPTH / PIECE;
    const u16 *x = static_cast<const u16 *>(p.x.data) + tile.head * p.x.stride_head;
#pragma unroll
    for (u32 i = threadIdx.x; i < TOKENS * PIECES; i += FOLIO_THREADS) {
        const u32 row = i / PIECES, token = tile.token + row, k = depth + i % PIECES * PIECE;
        const bool exists = token < p.num_tokens && k < p.depth;
        const u16 *source = exists ? x + token * p.x.stride_token + k : x;
        copy_piece(target + DepthRow::offset(row, i % PIECES), source, 1, exists, p.x_vectors);
    }
}

__device__ __forceinline__ void load_weight(const FolioProjectionParams &p, const Tile &tile, u32 depth, u32 target) {
    const u16 *weight = static_cast<const u16 *>(p.weight) + tile.head * p.weight_stride_head;
    const bool depth_first = p.weight_order == FOLIO_WEIGHT_DEPTH_FIRST;
    const u32 pieces = (depth_first ? DEPTH : COLUMNS) / PIECE;
#pragma unroll
    for (u32 i = threadIdx.x; i < DEPTH * COLUMNS / PIECE; i += FOLIO_THREADS) {
        const u32 row = i / pieces, piece = i % pieces;
        const u32 k = depth + (depth_first ? piece * PIECE : row);
        const u32 column = tile.column + (depth_first ? row : piece * PIECE);
        const bool exists = k < p.depth && column < p.columns;
        const u16 *source = exists ? weight + k * p.weight_stride_depth + column * p.weight_stride_column : weight;
        const u32 offset = depth_first ? DepthRow::offset(row, piece) : ColumnRow::offset(row, piece);
        copy_piece(target + offset, source, p.weight_stride_column, exists, p.weight_order != FOLIO_WEIGHT_ELEMENTS);
    }
}

// 32 tokens by 32 columns of a warp.
struct Sums {
    float d[2][4][4] = {};

    // Adds a step: `x` and `weight` are the addresses of their tiles.
    template <bool DEPTH_FIRST>
    __device__ __forceinline__ void add(u32 x, u32 weight, u32 first_token, u32 first_column) {
        const u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 step = 0; step < DEPTH / 16; ++step) {
            u32 a[2][4];
#pragma unroll
            for (u32 m = 0; m < 2; ++m) {
                ldmatrix_x4(a[m], x + DepthRow::offset(first_token + 16 * m + lane % 16, 2 * step + lane / 16));
            }
#pragma unroll
            for (u32 n = 0; n < 2; ++n) {
                u32 b[4];
                if constexpr (DEPTH_FIRST) {
                    const u32 column = first_column + 16 * n + lane % 8 + lane / 16 * 8;
                    ldmatrix_x4(b, weight + DepthRow::offset(column, 2 * step + lane / 8 % 2));
                } else {
                    const u32 chunk = (first_column + 16 * n) / PIECE + lane / 16;
                    ldmatrix_x4_trans(b, weight + ColumnRow::offset(16 * step + lane % 16, chunk));
                }
#pragma unroll
                for (u32 m = 0; m < 2; ++m) {
                    Element::mma(d[m][2 * n], a[m], b[0], b[1]);
                    Element::mma(d[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    __device__ __forceinline__ void store(const FolioProjectionParams &p, const Tile &tile, u32 first_token,
                                          u32 first_column) const {
        const u32 lane = threadIdx.x % 32;
        u16 *out = static_cast<u16 *>(p.out.data) + tile.head * p.out.stride_head;
#pragma unroll
        for (u32 m = 0; m < 2; ++m) {
#pragma unroll
            for (u32 n = 0; n < 4; ++n) {
#pragma unroll
                for (u32 r = 0; r < 2; ++r) {
                    const u32 token = tile.token + first_token + 16 * m + lane / 4 + 8 * r;
                    const u32 column = tile.column + first_column + 8 * n + lane % 4 * 2;
                    if (token >= p.num_tokens || column >= p.columns) continue;
                    u16 *at = out + token * p.out.stride_token + column;
                    const u32 pair = Element::pack(d[m][n][2 * r], d[m][n][2 * r + 1]);
                    if (p.out_pairs) {
                        *reinterpret_cast<u32 *>(at) = pair;
                    } else {
                        at[0] = static_cast<u16>(pair);
                        at[1] = static_cast<u16>(pair >> 16);
                    }
                }
            }
        }
    }
};

}  // namespace folio::projection

// Grid: one CTA per tile.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_project(const __grid_constant__ FolioProjectionParams p) {
    using namespace folio;
    using namespace folio::projection;
    __shared__ __align__(128) u8 stages[STAGES][STAGE_BYTES];
    wait_for_prerequisites();
    const Tile tile = tile_of_block(p);
    const u32 first_token = threadIdx.x / 64 * 32, first_column = threadIdx.x / 32 % 2 * 32;
    const u32 steps = (p.depth - 1) / DEPTH + 1;
    // A step past the last is an empty group, so that the wait below always means the same.
    const auto load = [&](u32 step) {
        if (step < steps) {
            const u32 target = shared_address(stages[step % STAGES]);
            load_x(p, tile, step * DEPTH, target);
            load_weight(p, tile, step * DEPTH, target + X_BYTES);
        }
        cp_async_commit();
    };
    for (u32 step = 0; step < STAGES - 1; ++step) load(step);
    Sums sums;
    for (u32 step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const u32 x = shared_address(stages[step % STAGES]), weight = x + X_BYTES;
        if (p.weight_order == FOLIO_WEIGHT_DEPTH_FIRST) {
            sums.add<true>(x, weight, first_token, first_column);
        } else {
            sums.add<false>(x, weight, first_token, first_column);
        }
        load(step + STAGES - 1);
    }
    sums.store(p, tile, first_token, first_column);
}
