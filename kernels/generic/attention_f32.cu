// Generic attention for fp32 queries, sm_80 and up: plain fp32 arithmetic on the ordinary units, because
// tf32 products keep 11 bits only. Complete for the contract, simple, and not tuned.
//
// A CTA has 16 rows (row = token * group + head in group), four per warp. Scores: a lane takes a key.
// Values: a lane takes pairs of columns, and gets each key's probability by a shuffle. Where rows are wider than 256,
// keys and values take turns in one place: both would be more than 99 KiB.
//
// Compiled once per row of the kernel table, with FOLIO_KV (f32, e4m3, e5m2), FOLIO_HEAD_DIM_QK,
// FOLIO_HEAD_DIM_VO (padded dims), FOLIO_Q_TILE (16), FOLIO_KV_TILE (32), FOLIO_THREADS (128),
// FOLIO_SHARED_BYTES.
#include "core/paged.cuh"
#include "generic/score_bias.cuh"
#include "generic/work.cuh"

namespace folio {

typedef FOLIO_KV Cached;
typedef CacheRows<Cached> Cache;
static_assert(Cache::SCALES == ScaleGranularity::HEAD, "scales stay out of the loop over keys");

constexpr int DIM_QK = FOLIO_HEAD_DIM_QK, DIM_VO = FOLIO_HEAD_DIM_VO;
constexpr int WARPS = FOLIO_THREADS / 32, ROWS = FOLIO_Q_TILE, ROWS_PER_WARP = ROWS / WARPS, KEYS = FOLIO_KV_TILE;
// Rows of K are 16 bytes longer, so that 32 lanes on 32 rows meet all banks.
constexpr int K_PITCH = DIM_QK + 4, COLUMN_PAIRS = DIM_VO / 64;
// CTAs per multiprocessor, as Hopper's shared memory has room for. Without this bound the compiler takes 95 to 123
// registers at head_dim 128, depending on the offsets of the parameters.
constexpr int CTAS = DIM_QK <= 128 ? 5 : 2;
static_assert(KEYS == 32, "a lane per key");
constexpr bool TURNS = DIM_QK > 256;
static_assert(!TURNS || DIM_VO <= K_PITCH, "values have room where keys were");
static_assert(FOLIO_SHARED_BYTES == 4 * (ROWS * DIM_QK + KEYS * (K_PITCH + (TURNS ? 0 : DIM_VO))),
              "the kernel table's shared memory");

extern __shared__ __align__(16) float shared_memory[];

struct Tiles {
    float *q, *k, *v;

    __device__ __forceinline__ Tiles() : q(shared_memory), k(q + ROWS * DIM_QK), v(TURNS ? k : k + KEYS * K_PITCH) {}
};

// A row of `count` elements, then zeros up to LENGTH; null is all zeros.
template <int LENGTH, class Element>
__device__ __forceinline__ void copy_row(float *target, const typename Element::Storage *source, u32 count) {
#pragma unroll
    for (u32 d = threadIdx.x % 32; d < LENGTH; d += 32) {
        target[d] = source && d < count ? Element::load(source[d]) : 0.0f;
    }
}

// The last elements of a key in two parts, over the zeros that the copy of the first ones wrote.
__device__ __forceinline__ void copy_rope(float *target, const Cache::Unit *source, u32 count) {
    __syncwarp();
#pragma unroll 1
    for (u32 d = threadIdx.x % 32; d < count; d += 32) target[d] = Cached::load(source[d]);
}

__device__ __forceinline__ void copy_queries(const FolioAttentionParams &p, const FolioGenericParams &g,
                                             const Work &work, float *q) {
    for (u32 row = threadIdx.x / 32; row < ROWS; row += WARPS) {
        const i64 token = static_cast<i64>(work.item->q_token) + work.row(row) / work.group;
        const float *source =
            static_cast<const float *>(p.q.data) + token * p.q.stride_token + work.qo_head(row) * p.q.stride_head;
        copy_row<DIM_QK, f32>(q + row * DIM_QK, source, g.head_dim_qk);
    }
}

// Calls copy(row, slot, there) for the keys of a tile that the warp copies. Keys outside the visible range or the cache
// are not there, and become zeros: nothing of them may reach a product.
template <class Copy>
__device__ __forceinline__ void for_each_key(const PageTable &table, KeyRange keys, i32 first_key, Copy copy) {
    for (u32 row = threadIdx.x / 32; row < KEYS; row += WARPS) {
        const i32 key = first_key + row;
        const bool visible = key >= keys.begin && key < keys.end;
        const KeySlot slot = visible ? table[key] : KeySlot{0, 0};
        copy(row, slot, visible && table.holds(slot));
    }
}

struct TileCopy {
    const FolioAttentionParams &p;
    const FolioGenericParams &g;
    const Tiles &tiles;
    u32 kv_head;

    __device__ __forceinline__ void key(u32 row, const KeySlot &slot, bool there) const {
        float *target = tiles.k + row * K_PITCH;
        const Cache::Unit *k = there ? Cache::row(p.k, slot.page, slot.token, kv_head) : nullptr;
        copy_row<DIM_QK, Cached>(target, k, g.head_dim_qk - g.rope_dim);
        if (there && g.rope_dim != 0) {
            const Cache::Unit *k_rope = Cache::row(g.k_rope, slot.page, slot.token, 0);
            copy_rope(target + g.head_dim_qk - g.rope_dim, k_rope, g.rope_dim);
        }
    }

    __device__ __forceinline__ void value(u32 row, const KeySlot &slot, bool there) const {
        const Cache::Unit *v = there ? Cache::row(p.v, slot.page, slot.token, kv_head) : nullptr;
        copy_row<DIM_VO, Cached>(tiles.v + row * DIM_VO, v, g.head_dim_vo);
    }
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_WARP, x, distance);
    return x;
}

// This lane's key against the warp's rows.
__device__ __forceinline__ void multiply_qk(float (&dot)[ROWS_PER_WARP], const Tiles &tiles, u32 warp_row, u32 dim) {
    const float *k = tiles.k + threadIdx.x % 32 * K_PITCH, *q = tiles.q + warp_row * DIM_QK;
#pragma unroll 4
    for (u32 d = 0; d < dim; d += 4) {
        const float4 b = *reinterpret_cast<const float4 *>(k + d);
#pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) {
            const float4 a = *reinterpret_cast<const float4 *>(q + r * DIM_QK + d);
            dot[r] += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
    }
}

typedef float Outputs[ROWS_PER_WARP][COLUMN_PAIRS][2];

__device__ __forceinline__ void multiply_pv(Outputs &o, const float (&probability)[ROWS_PER_WARP], const Tiles &tiles) {
#pragma unroll 4
    for (int key = 0; key < KEYS; key++) {
        float weight[ROWS_PER_WARP];
#pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) weight[r] = __shfl_sync(FULL_WARP, probability[r], key);
#pragma unroll
        for (int c = 0; c < COLUMN_PAIRS; c++) {
            const float *v = tiles.v + key * DIM_VO + 64 * c + 2 * (threadIdx.x % 32);
            const float2 value = *reinterpret_cast<const float2 *>(v);
#pragma unroll
            for (int r = 0; r < ROWS_PER_WARP; r++) {
                o[r][c][0] += weight[r] * value.x;
                o[r][c][1] += weight[r] * value.y;
            }
        }
    }
}

// A lane's columns go through shared memory, where the warp's queries were: an output has one of five types at any address,
// and what stores a pair of columns is compiled once for a row and not for each pair.
__device__ __forceinline__ void store_rows(const FolioAttentionParams &p, const FolioGenericParams &g, const Work &work,
                                           const Outputs &o, const RowState (&state)[ROWS_PER_WARP], float *q,
                                           u32 warp_row) {
    static_assert(DIM_VO <= DIM_QK, "outputs have room where queries were");
#pragma unroll
    for (int r = 0; r < ROWS_PER_WARP; r++) {
        float2 *const values = reinterpret_cast<float2 *>(q + (warp_row + r) * DIM_QK);
#pragma unroll
        for (int c = 0; c < COLUMN_PAIRS; c++) {
            values[32 * c + threadIdx.x % 32] = make_float2(o[r][c][0], o[r][c][1]);
        }
        const u32 row = work.first_row + warp_row + r;
        if (row >= work.num_rows) continue;
        const OutputRow out(p, g, *work.item, work.kv_head, row, state[r]);
#pragma unroll 1
        for (u32 pair = threadIdx.x % 32; 2 * pair < g.head_dim_vo; pair += 32) {
            const float2 value = values[pair];
            out.store(2 * pair, value.x, value.y);
        }
        if (threadIdx.x % 32 == 0) out.store_lse();
    }
}

__device__ __forceinline__ void attend(const FolioAttentionParams &p, const FolioGenericParams &g, const Work &work) {
    const Tiles tiles;
    const u32 warp_row = threadIdx.x / 32 * ROWS_PER_WARP;
    const KeyRange keys = visible_keys(p, work.request, *work.item, work.token(0), work.token(ROWS - 1));
    const PageTable table(p, *work.item, g.page_size);
    const LogitRule rule(p);
    const float scale = rule.scale<CapDivision::EXACT>(p, work.kv_head, work.request.index);
    RowState state[ROWS_PER_WARP];
    for (RowState &row : state) row = {minus_infinity(), 0.0f};
    Outputs o = {};
    copy_queries(p, g, work, tiles.q);
    const TileCopy copy = {p, g, tiles, work.kv_head};

    for (i32 first_key = keys.begin / KEYS * KEYS; first_key < keys.end; first_key += KEYS) {
        __syncthreads();
        for_each_key(table, keys, first_key, [&](u32 row, const KeySlot &slot, bool there) {
            copy.key(row, slot, there);
            if constexpr (!TURNS) copy.value(row, slot, there);
        });
        __syncthreads();
        float score[ROWS_PER_WARP] = {};
        multiply_qk(score, tiles, warp_row, g.head_dim_qk);
        const i32 key = first_key + threadIdx.x % 32;
        const bool biased = is_biased(g.bias, work.request, {first_key, first_key + KEYS});
#pragma unroll
        for (int r = 0; r < ROWS_PER_WARP; r++) {
            const RowMask mask(p, work.request, work.token(warp_row + r));
            const i32 position = static_cast<i32>(position_of(work.request, mask.row));
            const float slope = rule.slope(p, work.request.index, work.qo_head(warp_row + r));
            const bool seen = mask.sees(p, work.request, keys, key);
            float logit = seen ? rule(score[r], scale, slope, position - key) : minus_infinity();
            if (biased) {
                const i32 column = bias_column(g.bias, work.request, key);
                logit = BiasRow(g.bias, work, warp_row + r).add_to(logit, g.bias, column);
            }
            const float max = fmaxf(state[r].max, warp_max(logit)), base = exponent_base(max);
            const float correction = exp2_approx(state[r].max - base);
            score[r] = exp2_approx(logit - base);
            state[r] = {max, state[r].sum * correction + warp_sum(score[r])};
#pragma unroll
            for (int c = 0; c < COLUMN_PAIRS; c++) {
                o[r][c][0] *= correction;
                o[r][c][1] *= correction;
            }
        }
        if constexpr (TURNS) {
            __syncthreads();
            for_each_key(table, keys, first_key,
                         [&](u32 row, const KeySlot &slot, bool there) { copy.value(row, slot, there); });
            __syncthreads();
        }
        multiply_pv(o, score, tiles);
    }
    allow_dependents();
    // The copies of queries, where there was no key.
    __syncthreads();
    store_rows(p, g, work, o, state, tiles.q, warp_row);
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::CTAS)
    folio_attention_f32(const __grid_constant__ FolioGenericParams g) {
    folio::wait_for_prerequisites();
    folio::Work work;
    if (work.load(g, blockIdx.x, folio::ROWS)) folio::attend(g.attention, g, work);
}
