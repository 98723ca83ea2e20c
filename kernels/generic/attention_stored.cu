// Prefill for sm_80 and up with fp16 or bf16 queries over caches in other forms than rows of plain elements: mma.sync on
// tiles of 16-bit numbers, which stored_tiles.cuh makes of the cache. The form is known at run time, so that one kernel
// serves all. Rows, work items and warps are divided as in attention.cu's prefill. Decode is decode_stored.cu.
//
// What tiles hold is exact, and scales go where they are exact or nearly so:
//   token and head: that of a key multiplies its logits, that of a value its probability;
//   channel: keys' multiply the queries, which become sums of two 16-bit numbers each, and are multiplied in two steps;
//     values' multiply columns of the output. Zero points become one number for each row of queries, q . (scale * zero),
//     and one for each column, zero * sum of probabilities;
//   block (NVFP4): in the tile.
// So a score has an error of 2^-16 (bf16) or 2^-22 (fp16) of its terms by channel scales, and no other form adds any to what
// 16-bit probabilities have anyway.
//
// Compiled once per row of the kernel table, with FOLIO_Q (f16, bf16), FOLIO_HEAD_DIM_QK, FOLIO_HEAD_DIM_VO (padded dims),
// FOLIO_Q_TILE (rows), FOLIO_KV_TILE (keys), FOLIO_THREADS, FOLIO_SHARED_BYTES.
#include "generic/fragments.cuh"
#include "generic/score_bias.cuh"
#include "generic/stored_channels.cuh"
#include "generic/stored_output.cuh"
#include "generic/stored_tiles.cuh"

namespace folio {

typedef FOLIO_Q Query;
typedef FolioStoredAttentionParams Params;

constexpr int DIM_QK = FOLIO_HEAD_DIM_QK, DIM_VO = FOLIO_HEAD_DIM_VO;
constexpr int WARPS = FOLIO_THREADS / 32;
constexpr int ROWS = FOLIO_Q_TILE, ROWS_PER_WARP = ROWS / WARPS, M_TILES = ROWS_PER_WARP / 16;
constexpr int KEYS = FOLIO_KV_TILE, KEYS_PER_WARP = KEYS / WARPS;
static_assert(M_TILES * WARPS * 16 == ROWS && KEYS % 16 == 0 && KEYS <= 32, "whole tiles, and a lane for each key");

typedef StoredTile<Query, KEYS, KEYS_PER_WARP, DIM_QK> KeyTile;
typedef StoredTile<Query, KEYS, KEYS_PER_WARP, DIM_VO> ValueTile;
typedef TileRow<2 * DIM_QK> QRow;
typedef TileRow<2 * DIM_VO> VRow;

// Factors of a key: on its logits and on its probability.
struct KeyFactors {
    float logit, probability;
};

// Shared memory: queries in two 16-bit numbers, what zero points add to a row's scores; a tile, two stages of raw rows, and
// factors. Tiles begin at swizzled lines.
constexpr int Q_BYTES = ROWS * 2 * DIM_QK, QUERY_BYTES = 2 * Q_BYTES + (4 * ROWS + 127) / 128 * 128;
constexpr int TILE_BYTES = KeyTile::TILE_BYTES + ValueTile::TILE_BYTES;
constexpr int RAW_BYTES = KeyTile::RAW_BYTES + ValueTile::RAW_BYTES;
constexpr int RING_BYTES = TILE_BYTES + 2 * RAW_BYTES + KEYS * static_cast<int>(sizeof(KeyFactors));
static_assert(FOLIO_SHARED_BYTES == QUERY_BYTES + RING_BYTES, "the kernel table's shared memory");
static_assert(SharedStates<1, ROWS, DIM_VO>::BYTES <= FOLIO_SHARED_BYTES, "states of all warps");

extern __shared__ __align__(128) u8 shared_memory[];

__device__ __forceinline__ float *row_biases() { return reinterpret_cast<float *>(shared_memory + 2 * Q_BYTES); }

// Where a thread stands, and its fragment's rows and columns.
struct Lane {
    u32 warp, row, pair;

    __device__ __forceinline__ Lane() : warp(threadIdx.x / 32), row(threadIdx.x % 32 / 4), pair(threadIdx.x % 4) {}

    // Tile row of half `half` (rows 0-7, 8-15) of 16-row tile m.
    __device__ __forceinline__ u32 tile_row(int m, int half) const {
        return warp * ROWS_PER_WARP + 16 * m + 8 * half + row;
    }
};

// --- queries ----------------------------------------------------------------------------------------

// Two numbers as sums of two 16-bit numbers each.
__device__ __forceinline__ void split(float x, float y, u32 &high, u32 &low) {
    high = Query::pack(x, y);
    low = Query::pack(x - Query::load(static_cast<u16>(high)), y - Query::load(static_cast<u16>(high >> 16)));
}

// Eight elements of a row, times their scales; returns what their zero points add to its scores.
__device__ __forceinline__ float write_query_chunk(const Piece<Query> &q, const Channels &channels, float unit, u32 d,
                                                   u32 target) {
    u32 high[4], low[4];
    float bias = 0.0f, x[VECTOR];
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) x[i] = channels.scales ? q[i] * (channels.scales[d + i] / unit) : q[i];
#pragma unroll
    for (u32 i = 0; i < 4; i++) split(x[2 * i], x[2 * i + 1], high[i], low[i]);
    if (channels.zeros) {
        // Of what is multiplied, so that its error goes by q . k and not by what cancels.
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            const u32 shift = 16 * (i % 2);
            const float sum = Query::load(static_cast<u16>(high[i / 2] >> shift)) +
                              Query::load(static_cast<u16>(low[i / 2] >> shift));
            bias += sum * channels.zeros[d + i];
        }
    }
    st_shared_v4(target, high);
    st_shared_v4(target + Q_BYTES, low);
    return bias;
}

// A warp writes every WARPS-th row of the tile.
__device__ __forceinline__ void write_queries(const FolioGenericParams &g, const Work &work, const Channels &channels,
                                              float unit) {
    const FolioAttentionParams &p = g.attention;
    const u32 q_tile = shared_address(shared_memory);
#pragma unroll 1
    for (u32 tile_row = threadIdx.x / 32; tile_row < ROWS; tile_row += WARPS) {
        const u32 row = work.first_row + tile_row;
        const i64 token = static_cast<i64>(work.item->q_token) + row / work.group;
        const Query::Storage *source = row_of<Query>(p.q, token, work.kv_head * work.group + row % work.group);
        float bias = 0.0f;
        for (u32 chunk = threadIdx.x % 32; chunk < DIM_QK / VECTOR; chunk += 32) {
            const u32 d = VECTOR * chunk, target = q_tile + QRow::offset(tile_row, chunk);
            if (row < work.num_rows && d < g.head_dim_qk) {
                Piece<Query> q;
                q.load(source + d, VECTOR, g.q_copy_bytes == 16);
                bias += write_query_chunk(q, channels, unit, d, target);
            } else {
                const u32 zeros[4] = {};
                st_shared_v4(target, zeros);
                st_shared_v4(target + Q_BYTES, zeros);
            }
        }
        bias = warp_sum(bias);
        if (threadIdx.x % 32 == 0) row_biases()[tile_row] = bias;
    }
}

// --- keys and values --------------------------------------------------------------------------------

// Brings a warp's part of tile after tile. The slot of the next key is looked up a tile ahead of its copy.
struct KeyLoader {
    const Params &p;
    PageTable table;
    KeyRange keys;
    KeyTile k;
    ValueTile v;
    u32 ring;
    i32 key;         // this lane's in the next tile
    KeySlot slot;    // of that
    KeySlot copied;  // of the tile that was copied last, if the cache holds it
    bool holds;

    __device__ __forceinline__ KeyLoader(const Params &p, const Work &work, KeyRange keys, i32 first_tile, u32 ring,
                                         u32 first)
        : p(p),
          table(p.generic.attention, *work.item, p.generic.page_size),
          keys(keys),
          k{p.cache.k, p.cache.format, first, work.kv_head},
          v{p.cache.v, p.cache.format, first, work.kv_head},
          ring(ring),
          key(first_tile * KEYS + static_cast<i32>(k.row_of_tile())) {
        look_up();
    }

    __device__ __forceinline__ u32 raw(u32 stage) const { return ring + TILE_BYTES + stage * RAW_BYTES; }
    __device__ __forceinline__ u32 factors() const { return raw(2); }

    __device__ __forceinline__ bool is_copied_ahead() const {
        return p.copied_ahead && p.cache.format.form != FOLIO_FORM_PACKED_KEYS;
    }
    __device__ __forceinline__ bool valid() const { return key >= keys.begin && key < keys.end; }
    __device__ __forceinline__ void look_up() {
        if (valid()) slot = table[key];
    }

    // Starts the copies of the next tile.
    __device__ __forceinline__ void copy(u32 stage) {
        copied = slot;
        holds = valid() && table.holds(slot);
        if (is_copied_ahead()) {
            k.copy(raw(stage), copied, holds);
            v.copy(raw(stage) + KeyTile::RAW_BYTES, copied, holds);
        }
        key += KEYS;
        look_up();
    }

    // Makes the tile at `at` of rows that were copied; they have arrived.
    __device__ __forceinline__ void make(u32 stage, const KeySlot &at, bool is_held) const {
        if (p.cache.format.form == FOLIO_FORM_TOKEN_HEAD_SCALES) write_factors(at, is_held);
        if (is_copied_ahead()) {
            k.widen(ring, raw(stage), is_held);
            v.widen(ring + KeyTile::TILE_BYTES, raw(stage) + KeyTile::RAW_BYTES, is_held);
        } else {
            k.read(ring, at, is_held);
            v.read(ring + KeyTile::TILE_BYTES, at, is_held);
        }
    }

    __device__ __forceinline__ void write_factors(const KeySlot &at, bool is_held) const {
        if (threadIdx.x % 32 >= KEYS_PER_WARP) return;
        const auto scale = [&](const FolioStoredTensor &t) {
            return is_held ? *StoredRow(t, FOLIO_I8, at.page, at.token, k.head).scale() : 0.0f;
        };
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(factors() + k.row_of_tile() * 8), "f"(scale(p.cache.k)),
                     "f"(scale(p.cache.v))
                     : "memory");
    }
};

// Of two neighbouring keys.
__device__ __forceinline__ void load_factors(u32 factors, u32 key, KeyFactors (&two)[2]) {
    const uint4 v = ld_shared_v4(factors + key * sizeof(KeyFactors));
    two[0] = {__uint_as_float(v.x), __uint_as_float(v.y)};
    two[1] = {__uint_as_float(v.z), __uint_as_float(v.w)};
}

// --- a tile -----------------------------------------------------------------------------------------

typedef float Scores[M_TILES][KEYS / 8][4];
typedef float Outputs[M_TILES][DIM_VO / 8][4];
typedef FragmentSoftmax<M_TILES, KEYS / 8> Softmax;  // of the rows `lane.tile_row(m, half)`

// S += Q K^T of one tile.
__device__ __forceinline__ void multiply_qk(Scores &s, u32 q_tile, u32 k_tile, u32 first_row) {
    const KeyFragment at;
#pragma unroll
    for (int step = 0; step < DIM_QK / 16; step++) {
        u32 a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            load_queries<Query, QRow>(a[m], query_fragment<Query, QRow>(q_tile, first_row + 16 * m), step);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            ldmatrix_x4(b, k_tile + QRow::offset(16 * n + at.key, 2 * step + at.chunk));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                Query::mma(s[m][2 * n], a[m], b[0], b[1]);
                Query::mma(s[m][2 * n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// The scale of a value goes into its probability. fp16 holds the products relative to the largest scale so far, rounded up
// to a power of two; bf16 holds them as they are.
struct ValueScales {
    float unit;

    __device__ __forceinline__ ValueScales() : unit(Query::IS_BF16 ? 1.0f : 0.0f) {}

    // Takes over a tile's scales. Returns the factor for what was accumulated before.
    __device__ __forceinline__ float update(u32 factors) {
        if constexpr (Query::IS_BF16) return 1.0f;
        KeyFactors two[2];
        load_factors(factors, threadIdx.x % (KEYS / 2) * 2, two);
        const float largest = warp_max(fmaxf(fabsf(two[0].probability), fabsf(two[1].probability)));
        const float wanted = fmaxf(unit, power_of_two_above(largest)), factor = unit / wanted;
        unit = wanted;
        return factor;
    }
};

__device__ __forceinline__ void scale_outputs(Outputs &o, float factor) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int d = 0; d < DIM_VO / 8; d++) {
#pragma unroll
            for (int i = 0; i < 4; i++) o[m][d][i] *= factor;
        }
    }
}

// Multiplies the columns of a tile by its keys' factors.
template <float KeyFactors::*FACTOR>
__device__ __forceinline__ void scale_keys(Scores &s, u32 factors, u32 pair, float common) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
        KeyFactors two[2];
        load_factors(factors, 8 * n + 2 * pair, two);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float factor = two[i].*FACTOR * common;
#pragma unroll
            for (int m = 0; m < M_TILES; m++) s[m][n][i] *= factor, s[m][n][2 + i] *= factor;
        }
    }
}

// Dot products to base-2 logits; what a row may not see becomes -inf.
__device__ __forceinline__ void make_logits(Scores &s, const FolioAttentionParams &p, const Work &work,
                                            const LogitRule &rule, float scale, const Lane &lane, KeyRange keys,
                                            i32 first_key, bool unmasked) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (unmasked && rule.plain()) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) s[m][n][2 * half] *= scale, s[m][n][2 * half + 1] *= scale;
                continue;
            }
            const u32 tile_row = lane.tile_row(m, half);
            const RowMask mask(p, work.request, work.token(tile_row));
            const i32 position = static_cast<i32>(position_of(work.request, mask.row));
            const float slope = rule.slope(p, work.request.index, work.qo_head(tile_row));
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

// Takes over a tile's logits, which become probabilities; rescales what was accumulated before.
__device__ __forceinline__ void update(Softmax &softmax, Scores &s, Outputs &o) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float correction = softmax.update(s, m, half);
#pragma unroll
            for (int d = 0; d < DIM_VO / 8; d++) {
                o[m][d][2 * half] *= correction;
                o[m][d][2 * half + 1] *= correction;
            }
        }
    }
}

// --- results ----------------------------------------------------------------------------------------

__device__ __forceinline__ void store_states(const Outputs &o, const Softmax &softmax, const Lane &lane) {
    const SharedStates<1, ROWS, DIM_VO> states(shared_memory);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 row = lane.tile_row(m, half);
            if (lane.pair == 0) states.state(0, row) = softmax.state[m][half];
            for_each_pair<Query>(o, m, half, lane.pair, [&](u32 column, float x, float y) {
                *reinterpret_cast<float2 *>(states.row(0, row) + column) = make_float2(x, y);
            });
        }
    }
}

__device__ __forceinline__ void attend(const Params &params, const Work &work) {
    const FolioGenericParams &g = params.generic;
    const FolioAttentionParams &p = g.attention;
    const Lane lane;
    const u32 form = params.cache.format.form;
    const bool by_token = form == FOLIO_FORM_TOKEN_HEAD_SCALES;
    const u32 q_tile = shared_address(shared_memory), ring = q_tile + QUERY_BYTES;
    const KeyRange keys = visible_keys(p, work.request, *work.item, work.token(0), work.token(ROWS - 1));
    const i32 first_row = work.token(lane.warp * ROWS_PER_WARP);
    const i32 last_row = work.token(lane.warp * ROWS_PER_WARP + ROWS_PER_WARP - 1);
    i32 tile = keys.begin / KEYS;
    KeyLoader loader(params, work, keys, tile, ring, lane.warp * KEYS_PER_WARP);
    if (tile * KEYS < keys.end) loader.copy(0);
    cp_async_commit();

    const Channels of_keys(params.cache.k, form, work.kv_head);
    const float q_unit = of_keys.unit(g.head_dim_qk);
    write_queries(g, work, of_keys, q_unit);
    __syncthreads();
    float bias[M_TILES][2];
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
        for (int half = 0; half < 2; half++) bias[m][half] = row_biases()[lane.tile_row(m, half)];
    }

    const LogitRule rule(p);
    const float scale = rule.scale<CapDivision::EXACT>(p, work.kv_head, work.request.index) * q_unit;
    Softmax softmax;
    ValueScales value_scales;
    Outputs o = {};
    for (u32 stage = 0; tile * KEYS < keys.end; tile++, stage ^= 1) {
        const KeySlot slot = loader.copied;
        const bool is_held = loader.holds;
        if ((tile + 1) * KEYS < keys.end) loader.copy(stage ^ 1);
        cp_async_commit();
        cp_async_wait<1>();
        // Everyone has done with the tile before, and this warp's raw rows are here.
        __syncthreads();
        loader.make(stage, slot, is_held);
        __syncthreads();

        Scores s;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) s[m][n][i] = -bias[m][i / 2];
            }
        }
#pragma unroll 1
        for (u32 part = 0; part < (of_keys.scales ? 2 : 1); part++) {
            multiply_qk(s, q_tile + part * Q_BYTES, ring, lane.warp * ROWS_PER_WARP);
        }
        if (by_token) scale_keys<&KeyFactors::logit>(s, loader.factors(), lane.pair, 1.0f);
        const KeyRange span = {tile * KEYS, tile * KEYS + KEYS};
        const bool inside = span.begin >= keys.begin && span.end <= keys.end;
        make_logits(s, p, work, rule, scale, lane, keys, span.begin,
                    inside && all_see(p, work.request, first_row, last_row, span));
        if (is_biased(g.bias, work.request, span)) add_bias(s, g.bias, work, lane.warp * ROWS_PER_WARP, span.begin);
        update(softmax, s, o);
        if (by_token) {
            const float factor = value_scales.update(loader.factors());
            if (factor != 1.0f) scale_outputs(o, factor);
            scale_keys<&KeyFactors::probability>(s, loader.factors(), lane.pair, 1.0f / value_scales.unit);
        }
        multiply_values<Query, Query, VRow>(o, s, value_fragment<VRow>(ring + KeyTile::TILE_BYTES));
    }
    allow_dependents();
    softmax.finish();
    if (by_token) scale_outputs(o, value_scales.unit);
    const Channels of_values(params.cache.v, form, work.kv_head);
    cp_async_wait<0>();
    __syncthreads();
    store_states(o, softmax, lane);
    __syncthreads();
    SharedStates<1, ROWS, DIM_VO>(shared_memory).store(g, work, of_values);
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2)
    folio_attention_stored(const __grid_constant__ FolioStoredAttentionParams params) {
    folio::wait_for_prerequisites();
    folio::Work work;
    if (work.load(params.generic, blockIdx.x, folio::ROWS)) folio::attend(params, work);
}
