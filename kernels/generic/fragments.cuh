// The arithmetic of the generic kernels on fragments of mma.sync, in 16-row tiles of queries and 8-column tiles of keys or
// values: fragments of queries, O += P V, the softmax of a thread's rows, and which columns of the output it holds. What a
// tile is, where it lies and what a row may see is the kernels' own.
#pragma once
#include "core/mask.cuh"
#include "core/softmax.cuh"
#include "core/tile.cuh"

namespace folio {

// Where a lane's part of the fragments of 16 rows of queries is, from `row` of a tile on. It is a base: fragments further
// right and in rows further down, in multiples of 8, are constants away. `Row` is the tile's layout.
template <class Element, class Row>
__device__ __forceinline__ u32 query_fragment(u32 tile, u32 row) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (Element::IS_FP8) return tile + Row::offset(row + lane / 4, lane % 4 / 2) + lane % 2 * 8;
    return tile + Row::offset(row + lane % 16, lane / 16);
}

// A 16-row fragment of queries that goes with 16 elements of keys: in order for 16-bit keys; for fp8 keys in the order in
// which ldmatrix hands out bytes, elements 4p..4p+3 of a row to lane p.
template <class Element, class Row>
__device__ __forceinline__ void load_queries(u32 (&a)[4], u32 fragment, u32 step) {
    if constexpr (Element::IS_FP8) {
        const uint2 upper = ld_shared_v2(Row::step(fragment, 2 * step));
        const uint2 lower = ld_shared_v2(Row::step(fragment, 2 * step) + 8 * Row::BYTES_OF_ROW);
        a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
    } else {
        ldmatrix_x4(a, Row::step(fragment, 2 * step));
    }
}

// Where a lane's part of the fragments of 16 keys of values is; a base as query_fragment.
template <class Row>
__device__ __forceinline__ u32 value_fragment(u32 tile) {
    return tile + Row::offset(threadIdx.x % 16, threadIdx.x % 32 / 16);
}

// The lane's part of the fragments of 16 keys, whose rows are columns of the products: its key, and its 16-byte column of two.
struct KeyFragment {
    u32 key, chunk;

    __device__ __forceinline__ KeyFragment() {
        const u32 lane = threadIdx.x % 32;
        key = lane % 8 + lane / 16 * 8;
        chunk = lane / 8 % 2;
    }
};

// Where it is; a base as query_fragment.
template <class Row>
__device__ __forceinline__ u32 key_fragment(u32 tile) {
    const KeyFragment lane;
    return tile + Row::offset(lane.key, lane.chunk);
}

// O += P V of one tile of values of type `Element`, laid out as `Row`, of which `fragment` is the lane's part. For fp8
// values, column block 2c holds the even and 2c + 1 the odd ones of columns 16c..16c+15; see for_each_pair.
template <class Query, class Element, class Row, int M_TILES, int N_TILES, int D_TILES>
__device__ __forceinline__ void multiply_values(float (&o)[M_TILES][D_TILES][4], const float (&p)[M_TILES][N_TILES][4],
                                                u32 fragment) {
    // Column blocks of 32 bytes of values.
    constexpr int BLOCKS = Element::IS_FP8 ? 4 : 2;
#pragma unroll
    for (int t = 0; t < N_TILES / 2; t++) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            a[m][0] = Query::pack(p[m][2 * t][0], p[m][2 * t][1]);
            a[m][1] = Query::pack(p[m][2 * t][2], p[m][2 * t][3]);
            a[m][2] = Query::pack(p[m][2 * t + 1][0], p[m][2 * t + 1][1]);
            a[m][3] = Query::pack(p[m][2 * t + 1][2], p[m][2 * t + 1][3]);
        }
#pragma unroll
        for (int d = 0; d < D_TILES / BLOCKS; d++) {
            u32 b[4];
            ldmatrix_x4_trans(b, Row::step(fragment, 2 * d) + 16 * t * Row::BYTES_OF_ROW);
            if constexpr (Element::IS_FP8) {
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    const u32 even0 = Element::template widen<Query, 0, 2>(b[i]),
                              even1 = Element::template widen<Query, 0, 2>(b[i + 1]);
                    const u32 odd0 = Element::template widen<Query, 1, 3>(b[i]),
                              odd1 = Element::template widen<Query, 1, 3>(b[i + 1]);
#pragma unroll
                    for (int m = 0; m < M_TILES; m++) {
                        Query::mma(o[m][4 * d + i], a[m], even0, even1);
                        Query::mma(o[m][4 * d + i + 1], a[m], odd0, odd1);
                    }
                }
            } else {
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    Query::mma(o[m][2 * d], a[m], b[0], b[1]);
                    Query::mma(o[m][2 * d + 1], a[m], b[2], b[3]);
                }
            }
        }
    }
}

// Of a thread's columns of a tile, which are 8n and 8n + 1 from `first` on, those before `key`, counted: bit 2n + i of a
// word is that of column 8n + i.
template <int N_TILES>
__device__ __forceinline__ u32 columns_before(i32 key, i32 first) {
    const i32 columns = min(max(key - first, 0), 8 * N_TILES);
    return columns / 8 * 2 + min(columns % 8, 2);
}

// Which keys a row sees of a thread's columns of a tile. What asks for a custom mask or an mm-prefix range is in a loop:
// it is compiled once, and not for each column.
template <int N_TILES>
__device__ __forceinline__ u32 seen_columns(const FolioAttentionParams &p, const Request &request, const RowMask &mask,
                                            KeyRange tile, i32 first) {
    static_assert(2 * N_TILES < 32, "a bit per column");
    if (p.mask_mode <= FOLIO_MASK_FULL && p.num_mm_prefix_ranges == 0) {
        const u32 begin = columns_before<N_TILES>(max(mask.keys.begin, tile.begin), first);
        const u32 end = columns_before<N_TILES>(min(mask.keys.end, tile.end), first);
        return end > begin ? (1u << end) - (1u << begin) : 0;
    }
    u32 seen = 0;
#pragma unroll 1
    for (int i = 0; i < 2 * N_TILES; i++) {
        seen |= static_cast<u32>(mask.sees(p, request, tile, first + 8 * (i / 2) + i % 2)) << i;
    }
    return seen;
}

// How much the maximum of a row may grow before what was accumulated is rescaled, where probabilities of up to 2^8 are no
// harm: sums are as exact, and factors are mostly 1.
constexpr float MOST_GROWTH = 8.0f;

// One thread's share of the softmax: of each 16-row tile two rows, 8 apart.
template <int M_TILES, int N_TILES>
struct FragmentSoftmax {
    RowState state[M_TILES][2];

    __device__ __forceinline__ FragmentSoftmax() {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) state[m][0] = state[m][1] = {minus_infinity(), 0.0f};
    }

    // That of row `i` of the thread's, counted at run time.
    __device__ __forceinline__ RowState state_of(int i) const {
        RowState found = state[0][0];
#pragma unroll
        for (int j = 1; j < 2 * M_TILES; j++) {
            if (i == j) found = state[j / 2][j % 2];
        }
        return found;
    }

    // A row's logits, which are `unit` (positive) times the numbers in s, to probabilities relative to the state's maximum.
    // That is kept until a logit exceeds it by `growth`. Returns the factor for what was accumulated before.
    __device__ __forceinline__ float update(float (&s)[M_TILES][N_TILES][4], int m, int half, float unit = 1.0f,
                                            float growth = 0.0f) {
        RowState &row = state[m][half];
        float max = minus_infinity();
#pragma unroll
        for (int n = 0; n < N_TILES; n++) max = fmaxf(max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 1));
        max = unit * fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 2));
        float correction = 1.0f;
        if (max > row.max + growth) {
            correction = exp2_approx(row.max - max);
            row = {max, row.sum * correction};
        }
        const float base = exponent_base(row.max);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                s[m][n][i] = exp2_approx(fmaf(s[m][n][i], unit, -base));
                sum += s[m][n][i];
            }
        }
        row.sum += sum;
        return correction;
    }

    // The sums of a row's four lanes.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float &sum = state[m][half].sum;
                sum += __shfl_xor_sync(FULL_WARP, sum, 1);
                sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            }
        }
    }
};

// Multiplies each row's outputs by its factor, where `changes` says for a lane of the warp that one of its is not 1.
template <int M_TILES, int D_TILES>
__device__ __forceinline__ void rescale(float (&o)[M_TILES][D_TILES][4], const float (&factors)[M_TILES][2],
                                        bool changes) {
    if (!__any_sync(FULL_WARP, changes)) return;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int d = 0; d < D_TILES; d++) {
#pragma unroll
            for (int i = 0; i < 4; i++) o[m][d][i] *= factors[m][i / 2];
        }
    }
}

// Calls store(column, x, y) for every pair of neighbouring columns that lane `pair` of four holds of a row. `Element` is
// the type of the values, which decides where the columns are.
template <class Element, int M_TILES, int D_TILES, class Store>
__device__ __forceinline__ void for_each_pair(const float (&o)[M_TILES][D_TILES][4], int m, int half, u32 pair,
                                              Store store) {
#pragma unroll
    for (int c = 0; c < D_TILES / 2; c++) {
        const float *even = o[m][2 * c] + 2 * half, *odd = o[m][2 * c + 1] + 2 * half;
        if constexpr (Element::IS_FP8) {
            store(16 * c + 4 * pair, even[0], odd[0]);
            store(16 * c + 4 * pair + 2, even[1], odd[1]);
        } else {
            store(16 * c + 2 * pair, even[0], even[1]);
            store(16 * c + 8 + 2 * pair, odd[0], odd[1]);
        }
    }
}

}  // namespace folio
