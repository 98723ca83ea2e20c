// Generic attention for sm_80 and up with fp16 or bf16 queries: mma.sync and cp.async, one kernel for
// decode and prefill. It is complete for the contract; the rows in sm90/ are faster where they apply.
//
// A row of the tile is one query head of one token: row = token * group + head in group, so that a KV head
// is read once for its whole group. A CTA takes one KV head of one work item (head fastest: neighbouring
// CTAs read the same pages) and, for items of more rows than a tile, one row tile of it.
//   prefill: WARPS_M warps share a tile of keys and divide the rows. With one stage, values of a tile come while its keys
//     are multiplied, and keys of the next one while its values are: two blocks fit on a multiprocessor. Rows in fp8 are
//     widened once for all warps, each its own part, to a tile that keys and values have by turns.
//   decode: one row tile, WARPS_N warps that take every WARPS_N-th tile of keys, each with a ring of its
//     own, and merge their states at the end.
//   rows wider than 256, in both: as prefill, but the output of WARPS_M warps is too wide for their registers.
//     WARPS_D warps with the same rows have a part of its columns each. Each computes all logits of its rows,
//     so that none waits for another's.
//
// Compiled once per row of the kernel table, with
//   FOLIO_Q (f16, bf16; f16 over fp8 also reads queries in fp8, and decode in bf16), FOLIO_KV (that, e4m3 or e5m2),
//   FOLIO_HEAD_DIM_QK, FOLIO_HEAD_DIM_VO (padded dims),
//   FOLIO_Q_TILE (rows), FOLIO_KV_TILE (keys), FOLIO_THREADS, FOLIO_SHARED_BYTES, FOLIO_STAGES, FOLIO_WARPS_M,
//   FOLIO_WARPS_D.
#include "core/fp8_queries.cuh"
#include "core/tile.cuh"
#include "generic/bf16_queries.cuh"
#include "generic/fragments.cuh"
#include "generic/key_tiles.cuh"
#include "generic/score_bias.cuh"
#include "generic/scores.cuh"

namespace folio {

typedef FOLIO_Q Query;
typedef FOLIO_KV Cached;
typedef CacheRows<Cached> Cache;
template <bool WIDENED>
struct ProductType {
    typedef Cached Type;
};
template <>
struct ProductType<true> {
    typedef Query Type;
};

constexpr int DIM_QK = FOLIO_HEAD_DIM_QK, DIM_VO = FOLIO_HEAD_DIM_VO;
constexpr int WARPS_M = FOLIO_WARPS_M, WARPS_D = FOLIO_WARPS_D;
constexpr int SHARERS = WARPS_M * WARPS_D,
              WARPS_N = FOLIO_THREADS / 32 / SHARERS;  // warps that share a ring, and rings
constexpr int ROWS = FOLIO_Q_TILE, ROWS_PER_WARP = ROWS / WARPS_M, M_TILES = ROWS_PER_WARP / 16;
constexpr int KEYS = FOLIO_KV_TILE, STAGES = FOLIO_STAGES, COLUMNS = DIM_VO / WARPS_D;
// Where warps share keys in fp8, they are multiplied as what they were widened to.
constexpr bool WIDENS = Cached::IS_FP8 && WARPS_M == SHARERS && SHARERS > 1;
typedef ProductType<WIDENS>::Type Multiplied;
constexpr bool FP8 = Multiplied::IS_FP8;
// Decode for fp16 takes queries in bf16 too. (Tiles of wider rows, where all registers are taken, are 3 % slower so; two blocks of
// prefill of head_dim 128, which has more rows, fill the shared memory of compute capability 8.6 and 8.9.)
constexpr bool NARROWS = Cached::IS_FP8 && !Query::IS_BF16 && SHARERS == 1;
static_assert(!NARROWS || (DIM_QK % 64 == 0 && ROWS <= 32), "whole pieces of few rows");
// Registers for addresses that all iterations of the loop over keys have in common.
constexpr bool HAS_SPARE = WARPS_N > 1 || DIM_QK == DIM_VO;
static_assert(Cache::SCALES == ScaleGranularity::HEAD, "scales stay out of the loop over keys");
static_assert(SHARERS == 1 || WARPS_N == 1, "warps divide rows and columns, or keys");
static_assert(STAGES == 1 || STAGES == 2, "a tile's keys and values by turns, or a whole tile ahead");
static_assert(M_TILES * WARPS_M * 16 == ROWS && SHARERS * WARPS_N * 32 == FOLIO_THREADS, "whole tiles and warps");
static_assert(KEYS % 16 == 0 && KEYS / SHARERS <= 32 && ROWS / (SHARERS * WARPS_N) <= 32, "copies: a lane per row");

constexpr int Q_BYTES = DIM_QK * 2, K_BYTES = Cache::row_bytes(DIM_QK), V_BYTES = Cache::row_bytes(DIM_VO);
constexpr int STAGE_BYTES = KEYS * (K_BYTES + V_BYTES), RING_BYTES = STAGES * STAGE_BYTES;
static_assert(WARPS_D == 1 || Cache::row_bytes(COLUMNS) % 128 == 0,
              "the swizzle of a warp's columns is that of whole rows");
typedef TileRow<Q_BYTES> QRow;
typedef TileRow<WIDENS ? 2 * K_BYTES : K_BYTES> KRow;  // of what is multiplied
typedef TileRow<WIDENS ? 2 * V_BYTES : V_BYTES> VRow;
constexpr int WIDE_BYTES = WIDENS ? KEYS * 2 * (K_BYTES > V_BYTES ? K_BYTES : V_BYTES) : 0;
static_assert(FOLIO_SHARED_BYTES == ROWS * Q_BYTES + WARPS_N * RING_BYTES + WIDE_BYTES,
              "the kernel table's shared memory");
static_assert(WARPS_N == 1 || WARPS_N * ROWS * (DIM_VO + 2) * 4 <= FOLIO_SHARED_BYTES, "states of all warps");

extern __shared__ __align__(128) u8 shared_memory[];

// Where a thread stands, and its fragment's rows and columns.
struct Lane {
    u32 sharer, warp_m, warp_d, warp_n, row, pair;

    __device__ __forceinline__ Lane()
        : sharer(threadIdx.x / 32 % SHARERS),
          warp_m(sharer % WARPS_M),
          warp_d(sharer / WARPS_M),
          warp_n(threadIdx.x / 32 / SHARERS),
          row(threadIdx.x % 32 / 4),
          pair(threadIdx.x % 4) {}

    // Tile row of half `half` (rows 0-7, 8-15) of 16-row tile m.
    __device__ __forceinline__ u32 tile_row(int m, int half) const {
        return warp_m * ROWS_PER_WARP + 16 * m + 8 * half + row;
    }

    // The same where few runs ask: what follows from it is not computed before the loop, in registers that all would lack.
    __device__ __forceinline__ u32 seldom_tile_row(int m, int half) const { return kept(tile_row(m, half)); }
};

// Rows of the tile that a warp copies.
constexpr int COPIED_ROWS = ROWS / (SHARERS * WARPS_N);

__device__ __forceinline__ u32 first_copied_row() { return threadIdx.x / 32 * COPIED_ROWS; }

__device__ __forceinline__ void copy_queries(const FolioAttentionParams &p, const FolioGenericParams &g,
                                             const Work &work, u32 q_tile) {
    const u32 first = first_copied_row();
    const u32 row = work.first_row + first + threadIdx.x % 32;
    const bool fp8 = !Query::IS_BF16 && Cached::IS_FP8 && queries_are_fp8(p);
    const void *address = nullptr;
    if (threadIdx.x % 32 < COPIED_ROWS && row < work.num_rows) {
        const i64 token = static_cast<i64>(work.item->q_token) + row / work.group;
        const i64 head = work.kv_head * work.group + row % work.group;
        const i64 element = token * p.q.stride_token + head * p.q.stride_head;
        address = static_cast<const u8 *>(p.q.data) + (fp8 ? element : 2 * element);
    }
    if (fp8) {
        const bool is_e4m3 = p.flags & FOLIO_QUERIES_E4M3;
        copy_fp8_rows<COPIED_ROWS, Q_BYTES>(q_tile, first, address, g.head_dim_qk, g.q_copy_bytes, is_e4m3);
        return;
    }
    copy_rows<COPIED_ROWS, Q_BYTES>(q_tile, first, address, 2 * g.head_dim_qk, g.q_copy_bytes);
}

typedef KeyTiles<Cache, KEYS, KEYS / SHARERS, DIM_QK, DIM_VO, HAS_SPARE> Keys;
typedef float Scores[M_TILES][KEYS / 8][4];
typedef float Outputs[M_TILES][COLUMNS / 8][4];      // columns [warp_d * COLUMNS, + COLUMNS)
typedef FragmentSoftmax<M_TILES, KEYS / 8> Softmax;  // of the rows `lane.tile_row(m, half)`

// S = Q K^T of one tile, of which the lane's fragments are given.
template <class Kv>
__device__ __forceinline__ void multiply_qk(Scores &s, u32 queries, u32 keys) {
    constexpr int STEPS = FP8 ? DIM_QK / 32 : DIM_QK / 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[M_TILES][FP8 ? 2 : 1][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int half = 0; half < (FP8 ? 2 : 1); half++) {
                load_queries<Kv, QRow>(a[m][half], queries + 16 * m * Q_BYTES, (FP8 ? 2 : 1) * step + half);
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            ldmatrix_x4(b, KRow::step(keys, 2 * step) + 16 * n * KRow::BYTES_OF_ROW);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                if constexpr (FP8) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        Query::mma(s[m][2 * n + i / 2], a[m][i % 2], Kv::template widen<Query, 0, 1>(b[i]),
                                   Kv::template widen<Query, 2, 3>(b[i]));
                    }
                } else {
                    Query::mma(s[m][2 * n], a[m][0], b[0], b[1]);
                    Query::mma(s[m][2 * n + 1], a[m][0], b[2], b[3]);
                }
            }
        }
    }
}

// What each row of the tile sees by base mask and window.
__shared__ KeyRange row_keys[ROWS];

// What each was divided by, where queries in bf16 became fp16, and whether they have different powers.
__shared__ float row_powers[NARROWS ? ROWS : 1];
__shared__ bool powers_differ;

// Rows that are bf16 become fp16; all threads have asked for theirs before the last group of copies. Returns what all were
// divided by, or 1 where their powers differ.
__device__ __forceinline__ float narrow_queries(u32 q_tile) {
    const NarrowedRows<COPIED_ROWS, Q_BYTES> rows = {q_tile, first_copied_row()};
    cp_async_wait<1>();
    __syncwarp();
    rows.find_powers(row_powers);
    __syncthreads();
    const float power = power_of_all(row_powers, ROWS);
    rows.divide(row_powers, power);
    if (threadIdx.x == 0) powers_differ = power == 0.0f;
    return power > 0.0f ? power : 1.0f;
}

// Each warp has all rows and some keys: their states are merged through shared memory, where the ring was.
__device__ __forceinline__ void store_states_of_warps(const FolioAttentionParams &p, const FolioGenericParams &g,
                                                      const Work &work, const Outputs &o, const Softmax &softmax,
                                                      const Lane &lane) {
    float *values = reinterpret_cast<float *>(shared_memory);
    RowState *states = reinterpret_cast<RowState *>(values + WARPS_N * ROWS * DIM_VO);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 row = lane.warp_n * ROWS + lane.tile_row(m, half);
            if (lane.pair == 0) states[row] = softmax.state[m][half];
            for_each_pair<Multiplied>(o, m, half, lane.pair, [&](u32 column, float x, float y) {
                *reinterpret_cast<float2 *>(values + row * DIM_VO + column) = make_float2(x, y);
            });
        }
    }
    __syncthreads();
    // One warp per row; the warps' order is fixed, so results are the same in every run.
#pragma unroll 1
    for (u32 row = threadIdx.x / 32; row < ROWS && work.first_row + row < work.num_rows; row += WARPS_N) {
        RowState total = {minus_infinity(), 0.0f};
        float weights[WARPS_N];
#pragma unroll
        for (int w = 0; w < WARPS_N; w++) total.max = fmaxf(total.max, states[w * ROWS + row].max);
#pragma unroll
        for (int w = 0; w < WARPS_N; w++) {
            weights[w] = exp2_approx(states[w * ROWS + row].max - exponent_base(total.max));
            total.sum += weights[w] * states[w * ROWS + row].sum;
        }
        const OutputRow out(p, g, *work.item, work.kv_head, work.first_row + row, total);
#pragma unroll 1
        for (u32 column = 2 * (threadIdx.x % 32); column < g.head_dim_vo; column += 64) {
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < WARPS_N; w++) {
                const float2 part = *reinterpret_cast<float2 *>(values + (w * ROWS + row) * DIM_VO + column);
                sum.x += weights[w] * part.x;
                sum.y += weights[w] * part.y;
            }
            out.store(column, sum.x, sum.y);
        }
        if (threadIdx.x % 32 == 0) out.store_lse();
    }
}

// Each warp has some rows and all keys. They go through shared memory, where queries and ring were, 16 rows of a warp at a
// time: an output has one of five types at any address, and what stores a pair of columns is compiled once and not for each
// pair of a thread.
__device__ __forceinline__ void store_rows(const FolioAttentionParams &p, const FolioGenericParams &g, const Work &work,
                                           const Outputs &o, const Softmax &softmax, const Lane &lane) {
    static_assert(WARPS_N > 1 || WARPS_M * 16 * DIM_VO * 4 <= FOLIO_SHARED_BYTES, "16 rows of every warp");
    static_assert(WARPS_D == 1 || COLUMNS % 64 == 0, "a warp finds its own columns again");
    float *values = reinterpret_cast<float *>(shared_memory) + lane.warp_m * 16 * DIM_VO;
    // Lanes of neighbouring rows use different banks; a swizzled column stays within the row.
    constexpr u32 SWIZZLED_ROWS = DIM_VO % 64 == 0 ? 8 : 4;
    static_assert(DIM_VO % (8 * SWIZZLED_ROWS) == 0, "whole groups of columns");
    const auto at = [&](u32 row, u32 column) {
        return reinterpret_cast<float2 *>(values + row * DIM_VO + (column ^ 8 * (lane.row % SWIZZLED_ROWS)));
    };
#pragma unroll 1
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; i++) {
            if (i / 2 != m) continue;
            for_each_pair<Multiplied>(o, i / 2, i % 2, lane.pair, [&](u32 column, float x, float y) {
                *at(8 * (i % 2) + lane.row, lane.warp_d * COLUMNS + column) = make_float2(x, y);
            });
        }
        __syncwarp();
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            const u32 row = work.first_row + lane.tile_row(m, half);
            if (row >= work.num_rows) continue;
            const OutputRow out(p, g, *work.item, work.kv_head, row, softmax.state_of(2 * m + half));
            if (lane.pair == 0 && lane.warp_d == 0) out.store_lse();
            const u32 end = WARPS_D == 1 ? g.head_dim_vo : min(g.head_dim_vo, (lane.warp_d + 1) * COLUMNS);
#pragma unroll 1
            for (u32 column = lane.warp_d * COLUMNS + 2 * lane.pair; column < end; column += 8) {
                const float2 pair = *at(8 * half + lane.row, column);
                out.store(column, pair.x, pair.y);
            }
        }
        __syncwarp();
    }
}

// Waits until what this thread asked for last is here, and with it what its sharers did: all have done with what they
// read before.
__device__ __forceinline__ void await_copies() {
    cp_async_wait<0>();
    if constexpr (SHARERS > 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

__device__ __forceinline__ void attend(const FolioAttentionParams &p, const FolioGenericParams &g, const Work &work) {
    const Lane lane;
    const u32 q_tile = shared_address(shared_memory);
    const u32 ring = q_tile + ROWS * Q_BYTES + lane.warp_n * RING_BYTES;
    const KeyRange keys = visible_keys(p, work.request, *work.item, work.token(0), work.token(ROWS - 1));
    i32 tile = keys.begin / KEYS + lane.warp_n;
    Keys loader(p, g, work, keys, tile, lane.sharer * (KEYS / SHARERS));

    write_row_keys(row_keys, p, work);
    copy_queries(p, g, work, q_tile);
    if constexpr (NARROWS) cp_async_commit();
    if (tile * KEYS < keys.end) {
        loader.copy_keys(ring);
        if constexpr (STAGES == 2) loader.copy_values(ring + KEYS * K_BYTES), loader.advance(WARPS_N);
    }
    cp_async_commit();
    float power = 1.0f;
    if constexpr (NARROWS) {
        powers_differ = false;
        if (queries_are_bf16(p)) power = narrow_queries(q_tile);
    }
    // Where warps have keys of their own, they do not wait for each other's queries again.
    if constexpr (WARPS_N > 1) cp_async_wait<0>();
    __syncthreads();

    const u32 query_at = kept_if<HAS_SPARE>(query_fragment<Multiplied, QRow>(q_tile, lane.warp_m * ROWS_PER_WARP));
    const u32 wide = ring + RING_BYTES;
    const u32 key_at = kept_if<HAS_SPARE>(key_fragment<KRow>(WIDENS ? wide : ring));
    const u32 value_at = kept_if<HAS_SPARE>(
        value_fragment<VRow>(WIDENS ? wide : ring + KEYS * K_BYTES + lane.warp_d * Cache::row_bytes(COLUMNS)));
    const KeyRange of_all = keys_of_all_rows(row_keys, p, work, lane.warp_m * ROWS_PER_WARP, ROWS_PER_WARP, keys);
    Logits logits(p, work, g.bias.data);
    if constexpr (NARROWS) {
        logits.scale = scale_of_divided(logits.scale, power);
        logits.are_products &= !powers_differ;
    }
    Softmax softmax;
    Outputs o = {};
    for (int stage = 0; tile * KEYS < keys.end; tile += WARPS_N, stage = STAGES - 1 - stage) {
        const u32 k_tile = ring + stage * STAGE_BYTES, v_tile = k_tile + KEYS * K_BYTES;
        const bool has_next = (tile + WARPS_N) * KEYS < keys.end;
        await_copies();
        if constexpr (STAGES == 1) {
            loader.copy_values(v_tile);
            loader.advance(WARPS_N);
        } else if (has_next) {
            const u32 next = ring + (STAGES - 1 - stage) * STAGE_BYTES;
            loader.copy_keys(next);
            loader.copy_values(next + KEYS * K_BYTES);
            loader.advance(WARPS_N);
        }
        cp_async_commit();

        if constexpr (WIDENS) {
            loader.widen_keys<Query>(k_tile, wide);
            __syncthreads();
        }
        const KeyRange span = {tile * KEYS, tile * KEYS + KEYS};
        Scores s = {};
        multiply_qk<Multiplied>(s, query_at, key_at + stage * STAGE_BYTES);
        if (!logits.are_products) {
            if (NARROWS && powers_differ) multiply_rows(s, row_powers, lane);
            apply_rule(s, p, work, logits, lane, span.begin);
        }
        if (span.begin < of_all.begin || span.end > of_all.end) hide(s, row_keys, p, work, lane, keys, span.begin);
        if (is_biased(g.bias, work.request, span))
            add_bias(s, g.bias, work, kept(lane.warp_m * ROWS_PER_WARP), span.begin);
        update(softmax, s, o, logits.unit());
        if constexpr (STAGES == 1) {
            await_copies();
            if (has_next) loader.copy_keys(k_tile);
            cp_async_commit();
        }
        if constexpr (WIDENS) {
            loader.widen_values<Query>(v_tile, wide);
            __syncthreads();
        }
        multiply_values<Query, Multiplied, VRow>(o, s, value_at + stage * STAGE_BYTES);
    }
    allow_dependents();
    softmax.finish();
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (WARPS_N > 1) {
        store_states_of_warps(p, g, work, o, softmax, lane);
    } else {
        store_rows(p, g, work, o, softmax, lane);
    }
}

// Decode is bound by how many copies are under way, prefill by registers. A row has outputs and logits.
constexpr int HELD = M_TILES * (DIM_QK + KEYS);
constexpr int BLOCKS = WARPS_N == 1 || HELD > 160 ? 2 : HELD > 96 ? 3 : 4;

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::BLOCKS)
    folio_attention(const __grid_constant__ FolioGenericParams g) {
    folio::wait_for_prerequisites();
    folio::Work work;
    if (work.load(g, blockIdx.x, folio::ROWS)) folio::attend(g.attention, g, work);
}
