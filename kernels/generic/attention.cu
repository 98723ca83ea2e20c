// Generic attention for sm_80 and up with fp16 or bf16 queries: mma.sync and cp.async, one kernel for
// decode and prefill. It is complete for the contract; the rows in sm90/ are faster where they apply.
//
// A row of the tile is one query head of one token: row = token * group + head in group, so that a KV head
// is read once for its whole group. A CTA takes one KV head of one work item (head fastest: neighbouring
// CTAs read the same pages) and, for items of more rows than a tile, one row tile of it.
//   prefill: WARPS_M warps share a tile of keys and divide the rows.
//   decode: one row tile, WARPS_N warps that take every WARPS_N-th tile of keys, each with a ring of its
//     own, and merge their states at the end.
//   rows wider than 256, in both: as prefill, but the output of WARPS_M warps is too wide for their registers.
//     WARPS_D warps with the same rows have a part of its columns each. Each computes all logits of its rows,
//     so that none waits for another's.
//
// Compiled once per row of the kernel table, with
//   FOLIO_Q (f16, bf16; f16 over fp8 also reads queries in fp8), FOLIO_KV (that, e4m3 or e5m2), FOLIO_HEAD_DIM_QK, FOLIO_HEAD_DIM_VO (padded dims),
//   FOLIO_Q_TILE (rows), FOLIO_KV_TILE (keys), FOLIO_THREADS, FOLIO_SHARED_BYTES, FOLIO_WARPS_M, FOLIO_WARPS_D.
#include "core/fp8_queries.cuh"
#include "core/tile.cuh"
#include "generic/fragments.cuh"
#include "generic/score_bias.cuh"
#include "generic/work.cuh"

namespace folio {

typedef FOLIO_Q Query;
typedef FOLIO_KV Cached;
typedef CacheRows<Cached> Cache;

constexpr int DIM_QK = FOLIO_HEAD_DIM_QK, DIM_VO = FOLIO_HEAD_DIM_VO;
constexpr int WARPS_M = FOLIO_WARPS_M, WARPS_D = FOLIO_WARPS_D;
constexpr int SHARERS = WARPS_M * WARPS_D,
              WARPS_N = FOLIO_THREADS / 32 / SHARERS;  // warps that share a ring, and rings
constexpr int ROWS = FOLIO_Q_TILE, ROWS_PER_WARP = ROWS / WARPS_M, M_TILES = ROWS_PER_WARP / 16;
constexpr int KEYS = FOLIO_KV_TILE, STAGES = 2, COLUMNS = DIM_VO / WARPS_D;
constexpr bool FP8 = Cached::IS_FP8;
static_assert(Cache::SCALES == ScaleGranularity::HEAD, "scales stay out of the loop over keys");
static_assert(SHARERS == 1 || WARPS_N == 1, "warps divide rows and columns, or keys");
static_assert(M_TILES * WARPS_M * 16 == ROWS && SHARERS * WARPS_N * 32 == FOLIO_THREADS, "whole tiles and warps");
static_assert(KEYS % 16 == 0 && KEYS / SHARERS <= 32 && ROWS / (SHARERS * WARPS_N) <= 32, "copies: a lane per row");

constexpr int Q_BYTES = DIM_QK * 2, K_BYTES = Cache::row_bytes(DIM_QK), V_BYTES = Cache::row_bytes(DIM_VO);
constexpr int STAGE_BYTES = KEYS * (K_BYTES + V_BYTES), RING_BYTES = STAGES * STAGE_BYTES;
static_assert(WARPS_D == 1 || Cache::row_bytes(COLUMNS) % 128 == 0,
              "the swizzle of a warp's columns is that of whole rows");
typedef TileRow<Q_BYTES> QRow;
typedef TileRow<K_BYTES> KRow;
typedef TileRow<V_BYTES> VRow;
static_assert(FOLIO_SHARED_BYTES == ROWS * Q_BYTES + WARPS_N * RING_BYTES, "the kernel table's shared memory");
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
};

__device__ __forceinline__ void copy_queries(const FolioAttentionParams &p, const FolioGenericParams &g,
                                             const Work &work, u32 q_tile) {
    constexpr int WARPS = SHARERS * WARPS_N, PER_WARP = ROWS / WARPS;
    const u32 group = p.num_qo_heads / p.num_kv_heads, first = threadIdx.x / 32 * PER_WARP;
    const u32 row = work.first_row + first + threadIdx.x % 32;
    const bool fp8 = !Query::IS_BF16 && FP8 && queries_are_fp8(p);
    const void *address = nullptr;
    if (threadIdx.x % 32 < PER_WARP && row < work.num_rows) {
        const i64 token = static_cast<i64>(work.item->q_token) + row / group;
        const i64 head = work.kv_head * group + row % group;
        const i64 element = token * p.q.stride_token + head * p.q.stride_head;
        address = static_cast<const u8 *>(p.q.data) + (fp8 ? element : 2 * element);
    }
    if (fp8) {
        const bool is_e4m3 = p.flags & FOLIO_QUERIES_E4M3;
        copy_fp8_rows<PER_WARP, Q_BYTES>(q_tile, first, address, g.head_dim_qk, g.q_copy_bytes, is_e4m3);
        return;
    }
    copy_rows<PER_WARP, Q_BYTES>(q_tile, first, address, 2 * g.head_dim_qk, g.q_copy_bytes);
}

// Copies tiles of keys and values. The slot of the next tile's key is looked up one tile ahead.
struct KeyLoader {
    static constexpr int PER_WARP = KEYS / SHARERS;
    const FolioAttentionParams &p;
    const FolioGenericParams &g;
    PageTable table;
    KeyRange keys;
    u32 kv_head;
    i32 key;  // this lane's in the next tile
    KeySlot slot;

    __device__ __forceinline__ KeyLoader(const FolioAttentionParams &p, const FolioGenericParams &g, const Work &work,
                                         KeyRange keys, i32 first_tile, u32 sharer)
        : p(p),
          g(g),
          table(p, *work.item, g.page_size),
          keys(keys),
          kv_head(work.kv_head),
          key(first_tile * KEYS + sharer * PER_WARP + threadIdx.x % 32) {
        look_up();
    }

    __device__ __forceinline__ bool valid() const {
        return threadIdx.x % 32 < PER_WARP && key >= keys.begin && key < keys.end;
    }

    __device__ __forceinline__ void look_up() {
        if (valid()) slot = table[key];
    }

    // Keys outside the visible range or the cache become zeros, values too: 0 * NaN must not happen in P * V.
    __device__ __forceinline__ void copy(u32 stage, u32 sharer) {
        const Cache::Unit *k = nullptr, *k_rope = nullptr, *v = nullptr;
        if (valid() && table.holds(slot)) {
            k = Cache::row(p.k, slot.page, slot.token, kv_head);
            k_rope = Cache::row(g.k_rope, slot.page, slot.token, 0);
            v = Cache::row(p.v, slot.page, slot.token, kv_head);
        }
        const u32 k_bytes = Cache::row_bytes(g.head_dim_qk), v_bytes = Cache::row_bytes(g.head_dim_vo);
        if (g.rope_dim == 0) {
            copy_rows<PER_WARP, K_BYTES>(stage, sharer * PER_WARP, k, k_bytes, g.k_copy_bytes);
        } else {
            copy_split_rows<PER_WARP, K_BYTES>(stage, sharer * PER_WARP, k, k_rope,
                                               k_bytes - Cache::row_bytes(g.rope_dim), k_bytes,
                                               min(g.k_copy_bytes, g.k_rope_copy_bytes));
        }
        copy_rows<PER_WARP, V_BYTES>(stage + KEYS * K_BYTES, sharer * PER_WARP, v, v_bytes, g.v_copy_bytes);
        key += KEYS * WARPS_N;
        look_up();
    }
};

typedef float Scores[M_TILES][KEYS / 8][4];
typedef float Outputs[M_TILES][COLUMNS / 8][4];      // columns [warp_d * COLUMNS, + COLUMNS)
typedef FragmentSoftmax<M_TILES, KEYS / 8> Softmax;  // of the rows `lane.tile_row(m, half)`

// S = Q K^T of one tile.
template <class Kv>
__device__ __forceinline__ void multiply_qk(Scores &s, u32 q_tile, u32 k_tile, u32 first_row) {
    const u32 lane = threadIdx.x % 32, key = lane % 8 + lane / 16 * 8;
    constexpr int STEPS = FP8 ? DIM_QK / 32 : DIM_QK / 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 a[M_TILES][FP8 ? 2 : 1][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int half = 0; half < (FP8 ? 2 : 1); half++) {
                load_queries<Kv, QRow>(a[m][half], q_tile, first_row + 16 * m, (FP8 ? 2 : 1) * step + half);
            }
        }
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            ldmatrix_x4(b, k_tile + KRow::offset(16 * n + key, 2 * step + lane / 8 % 2));
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

// Takes over a tile's logits, which become probabilities; rescales what was accumulated before.
__device__ __forceinline__ void update(Softmax &softmax, Scores &s, Outputs &o) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float correction = softmax.update(s, m, half);
#pragma unroll
            for (int d = 0; d < COLUMNS / 8; d++) {
                o[m][d][2 * half] *= correction;
                o[m][d][2 * half + 1] *= correction;
            }
        }
    }
}

// Dot products to base-2 logits; what a row may not see becomes -inf.
__device__ __forceinline__ void make_logits(Scores &s, const FolioAttentionParams &p, const Work &work,
                                            const LogitRule &rule, float scale, const Lane &lane, KeyRange keys,
                                            i32 first_key, bool unmasked) {
    if (unmasked && rule.plain()) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] *= scale;
            }
        }
        return;
    }
    const u32 group = p.num_qo_heads / p.num_kv_heads;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 tile_row = lane.tile_row(m, half);
            const RowMask mask(p, work.request, work.token(tile_row, group));
            const i32 position = static_cast<i32>(position_of(work.request, mask.row));
            const float slope = rule.slope(p, work.request.index, work.qo_head(tile_row, group));
            const i32 first = first_key + 2 * static_cast<i32>(lane.pair);
            const u32 seen = unmasked ? ~0u : seen_columns<KEYS / 8>(p, work.request, mask, keys, first);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const i32 distance = position - (first + 8 * n + i);
                    float &x = s[m][n][2 * half + i];
                    x = seen >> (2 * n + i) & 1 ? rule(x, scale, slope, distance) : minus_infinity();
                }
            }
        }
    }
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
            for_each_pair<Cached>(o, m, half, lane.pair, [&](u32 column, float x, float y) {
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

// Each warp has some rows and all keys. They go through shared memory, where queries and ring were: an output has one of
// five types at any address, and what stores a pair of columns is compiled once and not for each pair of a thread.
__device__ __forceinline__ void store_rows(const FolioAttentionParams &p, const FolioGenericParams &g, const Work &work,
                                           const Outputs &o, const Softmax &softmax, const Lane &lane) {
    static_assert(WARPS_N > 1 || ROWS * DIM_VO * 4 <= FOLIO_SHARED_BYTES, "all rows");
    static_assert(WARPS_D == 1 || COLUMNS % 64 == 0, "a warp finds its own columns again");
    float *values = reinterpret_cast<float *>(shared_memory);
    // Lanes of neighbouring rows use different banks.
    const auto at = [&](u32 tile_row, u32 column) {
        return reinterpret_cast<float2 *>(values + tile_row * DIM_VO + (column ^ 8 * lane.row));
    };
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            for_each_pair<Cached>(o, m, half, lane.pair, [&](u32 column, float x, float y) {
                *at(lane.tile_row(m, half), lane.warp_d * COLUMNS + column) = make_float2(x, y);
            });
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 2 * M_TILES; i++) {
        const u32 tile_row = lane.tile_row(i / 2, i % 2), row = work.first_row + tile_row;
        if (row >= work.num_rows) continue;
        const OutputRow out(p, g, *work.item, work.kv_head, row, softmax.state_of(i));
        if (lane.pair == 0 && lane.warp_d == 0) out.store_lse();
        const u32 end = WARPS_D == 1 ? g.head_dim_vo : min(g.head_dim_vo, (lane.warp_d + 1) * COLUMNS);
#pragma unroll 1
        for (u32 column = lane.warp_d * COLUMNS + 2 * lane.pair; column < end; column += 8) {
            const float2 pair = *at(tile_row, column);
            out.store(column, pair.x, pair.y);
        }
    }
}

__device__ __forceinline__ void wait_for_tile() {
    cp_async_wait<STAGES - 2>();
    if constexpr (SHARERS > 1) {
        __syncthreads();
    } else {
        __syncwarp();
    }
}

__device__ __forceinline__ void attend(const FolioAttentionParams &p, const FolioGenericParams &g, const Work &work) {
    const Lane lane;
    const u32 group = p.num_qo_heads / p.num_kv_heads;
    const u32 q_tile = shared_address(shared_memory);
    const u32 ring = q_tile + ROWS * Q_BYTES + lane.warp_n * RING_BYTES;
    const KeyRange keys = visible_keys(p, work.request, *work.item, work.token(0, group), work.token(ROWS - 1, group));
    const i32 first_row = work.token(lane.warp_m * ROWS_PER_WARP, group);
    const i32 last_row = work.token(lane.warp_m * ROWS_PER_WARP + ROWS_PER_WARP - 1, group);
    i32 tile = keys.begin / KEYS + lane.warp_n;
    KeyLoader loader(p, g, work, keys, tile, lane.sharer);

    copy_queries(p, g, work, q_tile);
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if ((tile + stage * WARPS_N) * KEYS < keys.end) loader.copy(ring + stage * STAGE_BYTES, lane.sharer);
        cp_async_commit();
    }
    if constexpr (WARPS_N > 1) {
        // The queries were copied by all warps, the keys by each for itself.
        cp_async_wait<STAGES - 2>();
        __syncthreads();
    }

    const LogitRule rule(p);
    const float scale = rule.scale<CapDivision::EXACT>(p, work.kv_head, work.request.index);
    Softmax softmax;
    Outputs o = {};
    for (int stage = 0; tile * KEYS < keys.end; tile += WARPS_N, stage = stage + 1 == STAGES ? 0 : stage + 1) {
        wait_for_tile();
        const i32 ahead = tile + (STAGES - 1) * WARPS_N;
        if (ahead * KEYS < keys.end) {
            loader.copy(ring + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES, lane.sharer);
        }
        cp_async_commit();

        Scores s = {};
        const u32 k_tile = ring + stage * STAGE_BYTES;
        multiply_qk<Cached>(s, q_tile, k_tile, lane.warp_m * ROWS_PER_WARP);
        const KeyRange span = {tile * KEYS, tile * KEYS + KEYS};
        const bool inside = span.begin >= keys.begin && span.end <= keys.end;
        make_logits(s, p, work, rule, scale, lane, keys, span.begin,
                    inside && all_see(p, work.request, first_row, last_row, span));
        if (is_biased(g.bias, work.request, span)) add_bias(s, g.bias, work, lane.warp_m * ROWS_PER_WARP, span.begin);
        update(softmax, s, o);
        const u32 v_tile = k_tile + KEYS * K_BYTES + lane.warp_d * Cache::row_bytes(COLUMNS);
        multiply_values<Query, Cached, VRow>(o, s, v_tile);
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

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_attention(const __grid_constant__ FolioGenericParams g) {
    folio::wait_for_prerequisites();
    folio::Work work;
    if (work.load(g, blockIdx.x, folio::ROWS)) folio::attend(g.attention, g, work);
}
