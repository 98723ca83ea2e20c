// Products per head of few tokens on any device: out[t, h] = x[t, h] weight[h] for up to FOLIO_Q_TILE tokens. Such a call
// takes as long as its weights take to arrive, so every lane loads its part of the weight to registers at once, and
// nothing passes through shared memory but sums. Rows are aligned to 16 bytes.
//
// The weight's columns are the rows of the matrix unit and tokens its columns. A warp has 32 of the depth by
// FOLIO_KV_TILE columns, a lane a piece of it: 8 of the depth by an eighth of the columns. Which of the depth a lane has
// is free, since x is read in the same order.
#include "core/dtype.cuh"
#include "params/projection.h"

namespace folio::projection {

typedef FOLIO_Q Element;

constexpr u32 TOKENS = FOLIO_Q_TILE, COLUMNS = FOLIO_KV_TILE;
// Tokens of a product, and how many such blocks there are.
constexpr u32 BLOCK = 8, BLOCKS = TOKENS / BLOCK;
// Depth of a warp's step, and of a lane's piece of it.
constexpr u32 DEPTH = 32, PIECE = 8;
// Columns of a lane, and products of 16 columns.
constexpr u32 OWN = COLUMNS / 8, PRODUCTS = OWN / 2;
static_assert(TOKENS % BLOCK == 0 && (OWN == 2 || OWN == 4 || OWN == 8), "tile");

// So many neighbouring elements.
template <u32 ELEMENTS>
struct Vector {
    u32 words[ELEMENTS / 2];

    __device__ __forceinline__ void load(const u16 *from, bool exists) {
#pragma unroll
        for (u32 i = 0; i < ELEMENTS / 2; ++i) words[i] = 0;
        if (!exists) return;
        if constexpr (ELEMENTS == 8) {
            asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                         : "l"(from));
        } else if constexpr (ELEMENTS == 4) {
            asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                         : "=r"(words[0]), "=r"(words[1])
                         : "l"(from));
        } else {
            asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(words[0]) : "l"(from));
        }
    }
};

// The low or the high halves of two words.
__device__ __forceinline__ u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// A lane's piece of the weight, as it lies: 8 rows along the depth of OWN columns, or OWN columns of 8.
template <bool DEPTH_FIRST>
struct Piece;

template <>
struct Piece<false> {
    Vector<OWN> rows[PIECE];

    __device__ __forceinline__ void load(const FolioProjectionParams &p, const u16 *weight, u32 depth, u32 column) {
#pragma unroll
        for (u32 i = 0; i < PIECE; ++i) {
            rows[i].load(weight + (depth + i) * p.weight_stride_depth + column, depth < p.depth && column < p.columns);
        }
    }

    // Operand of product `n`, its columns 2 n and 2 n + 1, and step `step` of 16.
    __device__ __forceinline__ void operand(u32 (&a)[4], u32 n, u32 step) const {
        const Vector<OWN> *r = rows + 4 * step;
        a[0] = low_halves(r[0].words[n], r[1].words[n]);
        a[1] = high_halves(r[0].words[n], r[1].words[n]);
        a[2] = low_halves(r[2].words[n], r[3].words[n]);
        a[3] = high_halves(r[2].words[n], r[3].words[n]);
    }
};

template <>
struct Piece<true> {
    Vector<PIECE> columns[OWN];

    __device__ __forceinline__ void load(const FolioProjectionParams &p, const u16 *weight, u32 depth, u32 column) {
#pragma unroll
        for (u32 i = 0; i < OWN; ++i) {
            columns[i].load(weight + (column + i) * p.weight_stride_column + depth,
                            depth < p.depth && column < p.columns);
        }
    }

    __device__ __forceinline__ void operand(u32 (&a)[4], u32 n, u32 step) const {
        const Vector<PIECE> *c = columns + 2 * n;
        a[0] = c[0].words[2 * step];
        a[1] = c[1].words[2 * step];
        a[2] = c[0].words[2 * step + 1];
        a[3] = c[1].words[2 * step + 1];
    }
};

struct Place {
    u32 head, column, token;
};

// Sums of a lane: columns OWN (lane / 4) and on, tokens 2 (lane % 4) and the next of every block.
struct Sums {
    float d[PRODUCTS][BLOCKS][4] = {};
};

template <bool DEPTH_FIRST>
__device__ __forceinline__ Sums multiply(const FolioProjectionParams &p, const Place &place) {
    const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const u16 *weight = static_cast<const u16 *>(p.weight) + place.head * p.weight_stride_head;
    const u16 *x = static_cast<const u16 *>(p.x.data) + place.head * p.x.stride_head;
    Sums sums;
    for (u32 first = threadIdx.x / 32 * DEPTH; first < p.depth; first += warps * DEPTH) {
        const u32 depth = first + lane % 4 * PIECE;
        Piece<DEPTH_FIRST> piece;
        piece.load(p, weight, depth, place.column + lane / 4 * OWN);
        Vector<PIECE> rows[BLOCKS];
#pragma unroll
        for (u32 b = 0; b < BLOCKS; ++b) {
            const u32 token = min(place.token + b * BLOCK + lane / 4, p.num_tokens - 1);
            rows[b].load(x + token * p.x.stride_token + depth, depth < p.depth);
        }
#pragma unroll
        for (u32 step = 0; step < 2; ++step) {
#pragma unroll
            for (u32 n = 0; n < PRODUCTS; ++n) {
                u32 a[4];
                piece.operand(a, n, step);
#pragma unroll
                for (u32 b = 0; b < BLOCKS; ++b) {
                    Element::mma(sums.d[n][b], a, rows[b].words[2 * step], rows[b].words[2 * step + 1]);
                }
            }
        }
    }
    return sums;
}

// The sum of a column's token over all warps: [warp][token][column].
constexpr u32 ROW = COLUMNS + 4;

__device__ __forceinline__ void add_up(const FolioProjectionParams &p, const Place &place, const Sums &sums,
                                       float *shared) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float *own = shared + warp * TOKENS * ROW;
#pragma unroll
    for (u32 b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (u32 r = 0; r < 2; ++r) {
            float *row = own + (b * BLOCK + lane % 4 * 2 + r) * ROW + lane / 4 * OWN;
#pragma unroll
            for (u32 n = 0; n < PRODUCTS; ++n) {
                *reinterpret_cast<float2 *>(row + 2 * n) = make_float2(sums.d[n][b][r], sums.d[n][b][2 + r]);
            }
        }
    }
    __syncthreads();
    constexpr u32 PAIRS = COLUMNS / 2;
    for (u32 i = threadIdx.x; i < TOKENS * PAIRS; i += blockDim.x) {
        const u32 token = i / PAIRS, column = i % PAIRS * 2;
        const float *at = shared + token * ROW + column;
        float2 sum = make_float2(0, 0);
        for (u32 w = 0; w < warps; ++w) {
            const float2 part = *reinterpret_cast<const float2 *>(at + w * TOKENS * ROW);
            sum.x += part.x;
            sum.y += part.y;
        }
        if (place.token + token < p.num_tokens && place.column + column < p.columns) {
            u16 *out = static_cast<u16 *>(p.out.data);
            out += (place.token + token) * p.out.stride_token + place.head * p.out.stride_head + place.column + column;
            *reinterpret_cast<u32 *>(out) = Element::pack(sum.x, sum.y);
        }
    }
}

template <bool DEPTH_FIRST>
__device__ __forceinline__ void project(const FolioProjectionParams &p) {
    extern __shared__ __align__(16) float partial[];
    const u32 column_blocks = (p.columns - 1) / COLUMNS + 1;
    const Place place = {blockIdx.x / column_blocks, blockIdx.x % column_blocks * COLUMNS, blockIdx.y * TOKENS};
    wait_for_prerequisites();
    const Sums sums = multiply<DEPTH_FIRST>(p, place);
    allow_dependents();
    add_up(p, place, sums, partial);
}

}  // namespace folio::projection

// Grid: a CTA for every FOLIO_KV_TILE columns of a head, times blocks of tokens. Any number of warps: they share the depth.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_project_few_depth_first(const __grid_constant__ FolioProjectionParams p) {
    folio::projection::project<true>(p);
}

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_project_few_columns_first(const __grid_constant__ FolioProjectionParams p) {
    folio::projection::project<false>(p);
}
