// Absorbed multi-head latent attention for sm_80 and up: mma.sync and cp.async, complete for the contract of MLA. The
// rows in sm90/ are faster where they apply.
//
// A row of the tile is one query head of one token: row = token * num_heads + head. A CTA takes one row tile of one
// work item (row tile fastest: neighbouring CTAs read the same pages). Its warps divide the columns, those of the
// latent and those of the rotary part alike: a warp copies its slice of every key, multiplies it with its slice of the
// queries, which it keeps, and has the same columns of the output. So keys are read once, as keys and as values, and no
// warp waits for another one's copies. What the warps exchange is their parts of the dot products, through shared
// memory; then each of them has all logits, and computes the softmax of all rows by itself.
//
// A record of fp8_ds_mla has one scale for the latent columns of each warp. It multiplies that warp's part of the
// product, and the weights before they meet the values: no element is rounded on its way from the cache.
//
// Compiled once per row of the kernel table, with
//   FOLIO_Q (f16, bf16), FOLIO_KV (that, e4m3 or e5m2), FOLIO_DS_MLA (0, 1), FOLIO_HEAD_DIM_QK, FOLIO_HEAD_DIM_VO
//   (padded dims), FOLIO_Q_TILE (rows), FOLIO_KV_TILE (keys), FOLIO_THREADS, FOLIO_SHARED_BYTES.
#include "core/ds_mla.cuh"
#include "core/mask.cuh"
#include "core/softmax.cuh"
#include "core/tile.cuh"
#include "generic/fragments.cuh"
#include "params/mla.h"

namespace folio {

typedef FOLIO_Q Query;

constexpr int WARPS = FOLIO_THREADS / 32;
constexpr int ROWS = FOLIO_Q_TILE, M_TILES = ROWS / 16;
constexpr int KEYS = FOLIO_KV_TILE, N_TILES = KEYS / 8;
// A warp's columns.
constexpr int COLUMNS = FOLIO_HEAD_DIM_VO / WARPS, ROPE_COLUMNS = (FOLIO_HEAD_DIM_QK - FOLIO_HEAD_DIM_VO) / WARPS;
static_assert(ROWS == 32 && KEYS % 16 == 0 && KEYS <= 32, "two tiles of rows, and a lane per row");
static_assert(COLUMNS % 64 == 0 && ROPE_COLUMNS == 16, "whole pieces of 16 bytes and of a product");

// Where the parts of a key are. Offsets and lengths are in bytes; `bytes` of a part are those of all warps.
struct KeyAddress {
    const u8 *latent, *rope;
    float scale;
};

// Elements one after another, the rotary ones in a tensor of their own.
struct PlainKeys {
    typedef FOLIO_KV Latent;
    typedef FOLIO_KV Rope;
    static constexpr bool SCALED = false;

    static __device__ __forceinline__ const u8 *row(const FolioCache &cache, const KeySlot &slot) {
        return reinterpret_cast<const u8 *>(CacheRows<Latent>::row(cache, slot.page, slot.token, 0));
    }
    static __device__ __forceinline__ KeyAddress at(const FolioMlaParams &g, const KeySlot &slot, u32) {
        return {row(g.attention.k, slot), g.k_rope.data ? row(g.k_rope, slot) : nullptr, 1.0f};
    }
    static __device__ __forceinline__ u32 rope_copy_bytes(const FolioMlaParams &g) { return g.k_rope_copy_bytes; }
};

struct DsMlaKeys {
    typedef DsMlaRows::Latent Latent;
    typedef DsMlaRows::Rope Rope;
    static constexpr bool SCALED = true;

    static __device__ __forceinline__ KeyAddress at(const FolioMlaParams &g, const KeySlot &slot, u32 warp) {
        static_assert(!FOLIO_DS_MLA || COLUMNS == DsMlaRows::BLOCK, "a scale per warp");
        const u8 *record = DsMlaRows::record(g.attention.k, slot.page, slot.token);
        return {record, record + DsMlaRows::ROPE_AT, DsMlaRows::scale(record, warp, g.k_copy_bytes)};
    }
    // The parts of a record are multiples of 16 bytes apart.
    static __device__ __forceinline__ u32 rope_copy_bytes(const FolioMlaParams &g) { return g.k_copy_bytes; }
};

template <bool DS_MLA>
struct KeysOf {
    typedef PlainKeys Type;
};
template <>
struct KeysOf<true> {
    typedef DsMlaKeys Type;
};
typedef KeysOf<FOLIO_DS_MLA != 0>::Type Keys;
typedef Keys::Latent Latent;
typedef Keys::Rope Rope;

// A warp's shared memory: a ring of its slices of tiles of keys, its parts of the dot products of two tiles, and its
// slice of the queries. The latent part of the first 16 rows, which goes to registers, lies where the products will be.
// (More of the queries in registers would spill.) Rows of a rotary slice are 16 or 32 bytes of 64, which is the least
// that a tile of rows can have.
constexpr int Q_BYTES = 2 * COLUMNS, K_BYTES = COLUMNS * sizeof(Latent::Storage), ROPE_BYTES = 64;
typedef TileRow<Q_BYTES> QRow;
typedef TileRow<K_BYTES> KRow;
typedef TileRow<ROPE_BYTES> RopeRow;
constexpr int STAGES = Latent::IS_FP8 ? 3 : 2;
constexpr int STAGE_BYTES = KEYS * (K_BYTES + ROPE_BYTES), PRODUCTS_BYTES = ROWS * KEYS * 4;
constexpr int PRODUCTS_AT = STAGES * STAGE_BYTES, QUERIES_AT = PRODUCTS_AT + 2 * PRODUCTS_BYTES - 16 * Q_BYTES;
constexpr int Q_ROPE_AT = QUERIES_AT + ROWS * Q_BYTES, WARP_BYTES = Q_ROPE_AT + ROWS * ROPE_BYTES;
static_assert(QUERIES_AT >= STAGE_BYTES && QUERIES_AT % 128 == 0, "the first tile of keys comes with the queries");
static_assert(FOLIO_SHARED_BYTES == WARPS * WARP_BYTES, "the kernel table's shared memory");

extern __shared__ __align__(128) u8 shared_memory[];

// Where a thread stands, and its fragment's rows and columns.
struct Lane {
    u32 warp, lane, row, pair;

    __device__ __forceinline__ Lane() : warp(threadIdx.x / 32), lane(threadIdx.x % 32), row(lane / 4), pair(lane % 4) {}

    // Tile row of half `half` (rows 0-7, 8-15) of 16-row tile m.
    __device__ __forceinline__ u32 tile_row(int m, int half) const { return 16 * m + 8 * half + row; }

    __device__ __forceinline__ u8 *memory_of(u32 warp) const { return shared_memory + warp * WARP_BYTES; }
};

// A row tile of a work item.
struct Work {
    const FolioWorkItem *item;  // read where it is needed: registers are scarce
    Request request;
    u32 first_row;  // of the item's, all heads counted

    // False where there is nothing to do.
    __device__ __forceinline__ bool load(const FolioMlaParams &g, u32 block) {
        const FolioAttentionParams &p = g.attention;
        const u32 index = block / g.row_tiles;
        if (index >= p.plan.counts[FOLIO_COUNT_ITEMS]) return false;
        item = p.plan.items + index;
        request = load_request(p.plan, *item);
        first_row = (block - index * g.row_tiles) * ROWS;
        return first_row < num_rows(p);
    }

    // Rows of the item.
    __device__ __forceinline__ u32 num_rows(const FolioAttentionParams &p) const {
        return existing_rows(p, item->q_token, item->q_len) * p.num_qo_heads;
    }

    // The token of one of the item's rows within the request.
    __device__ __forceinline__ i32 token(const FolioMlaParams &g, u32 row) const {
        return item->q_start + divide(row, g.num_heads);
    }

    // Where the keys end that a token sees: MLA has causal and full masks, no windows and no mm-prefix.
    __device__ __forceinline__ i32 end_of(const FolioAttentionParams &p, i32 token) const {
        if (p.mask_mode != FOLIO_MASK_CAUSAL) return request.kv_len;
        return static_cast<i32>(min(position_of(request, token) + 1, static_cast<i64>(request.kv_len)));
    }
};

// Elements of a part with `dim` elements that begin at the warp's columns.
__device__ __forceinline__ i32 elements_of(u32 dim, u32 warp, u32 columns) {
    return static_cast<i32>(min(dim - min(dim, warp * columns), columns));
}

// The warp's slice of the queries: fragments of the latent part of the first 16 rows, and where the others lie.
struct Queries {
    u32 first[COLUMNS / 16][4];
    u32 latent, rope;

    static __device__ __forceinline__ void copy(const FolioMlaParams &g, const Work &work, const Lane &lane) {
        const FolioAttentionParams &p = g.attention;
        const u32 row = work.first_row + lane.lane, memory = shared_address(lane.memory_of(lane.warp));
        const u16 *latent = nullptr, *rope = nullptr;
        if (lane.lane < ROWS && row < work.num_rows(p)) {
            const u32 token_in_item = divide(row, g.num_heads);
            const i64 token = static_cast<i64>(work.item->q_token) + token_in_item;
            const i64 head = row - token_in_item * p.num_qo_heads;
            latent = static_cast<const u16 *>(p.q.data) + token * p.q.stride_token + head * p.q.stride_head +
                     lane.warp * COLUMNS;
            if (g.q_rope.data) {
                rope = static_cast<const u16 *>(g.q_rope.data) + token * g.q_rope.stride_token +
                       head * g.q_rope.stride_head + lane.warp * ROPE_COLUMNS;
            }
        }
        copy_rows<ROWS, Q_BYTES>(memory + QUERIES_AT, 0, latent, 2 * elements_of(g.kv_lora_rank, lane.warp, COLUMNS),
                                 g.q_copy_bytes);
        copy_rows<ROWS, ROPE_BYTES>(memory + Q_ROPE_AT, 0, rope,
                                    2 * elements_of(g.qk_rope_head_dim, lane.warp, ROPE_COLUMNS), g.q_rope_copy_bytes);
    }

    __device__ __forceinline__ explicit Queries(const Lane &lane) {
        const u32 memory = shared_address(lane.memory_of(lane.warp));
        latent = memory + QUERIES_AT, rope = memory + Q_ROPE_AT;
#pragma unroll
        for (int step = 0; step < COLUMNS / 16; step++)
            load_queries<Latent, QRow>(first[step], query_fragment<Latent, QRow>(latent, 0), step);
    }
};

// Copies the warp's slices of tiles of keys. The slot of the next tile's key is looked up one tile ahead.
struct KeyLoader {
    // Of the latent slices, which eight lanes share; two lanes share a rotary one.
    typedef LaneRows<KEYS, K_BYTES, 8, false> Rows;
    static_assert(KEYS == 16, "two lanes for a rotary slice");

    const FolioMlaParams &g;
    PageTable table;
    KeyRange keys;
    u32 warp;
    i32 key;  // this lane's in the next tile
    KeySlot slot;
    Rows rows;
    bool in_pieces;  // slices are whole pieces at multiples of 16 bytes

    __device__ __forceinline__ KeyLoader(const FolioMlaParams &g, const Work &work, KeyRange keys, const Lane &lane)
        : g(g),
          table(g.attention, *work.item, g.page_size),
          keys(keys),
          warp(lane.warp),
          key(keys.begin / KEYS * KEYS + lane.lane),
          rows(0) {
        in_pieces = g.k_copy_bytes == 16 && latent_bytes() % 16 == 0 && rope_bytes() % 16 == 0 &&
                    (rope_bytes() == 0 || Keys::rope_copy_bytes(g) == 16);
        look_up();
    }

    __device__ __forceinline__ bool valid() const { return threadIdx.x % 32 < KEYS && keys.holds(key); }

    __device__ __forceinline__ void look_up() {
        if (valid()) slot = table[key];
    }

    // Keys outside the visible range or the cache become zeros: 0 * NaN must not happen in P * V. Returns the scale of
    // the lane's key.
    __device__ __forceinline__ float copy(u32 stage) {
        KeyAddress address = {nullptr, nullptr, 0.0f};
        if (valid() && table.holds(slot)) {
            address = Keys::at(g, slot, warp);
            address.latent += warp * K_BYTES;
            if (address.rope) address.rope += warp * ROPE_COLUMNS * sizeof(Rope::Storage);
        }
        if (in_pieces) {
            copy_pieces(stage, address);
        } else {
            copy_unaligned_rows<KEYS, K_BYTES>(stage, 0, address.latent, latent_bytes(), g.k_copy_bytes);
            copy_unaligned_rows<KEYS, ROPE_BYTES>(stage + KEYS * K_BYTES, 0, address.rope, rope_bytes(),
                                                  Keys::rope_copy_bytes(g));
        }
        key += KEYS;
        look_up();
        return address.scale;
    }

private:
    // Of the warp's slices.
    __device__ __forceinline__ i32 latent_bytes() const {
        return elements_of(g.kv_lora_rank, warp, COLUMNS) * sizeof(Latent::Storage);
    }
    __device__ __forceinline__ i32 rope_bytes() const {
        return elements_of(g.qk_rope_head_dim, warp, ROPE_COLUMNS) * sizeof(Rope::Storage);
    }

    __device__ __forceinline__ void copy_pieces(u32 stage, const KeyAddress &address) const {
#pragma unroll
        for (int pass = 0; pass < Rows::PASSES; pass++) {
            const u8 *row = row_address(address.latent, Rows::row(pass));
            const i32 pieces = latent_bytes() / 16 - static_cast<i32>(Rows::column());
            rows.copy(stage, pass, row + 16 * Rows::column(), row ? pieces : 0);
        }
        const u32 lane = threadIdx.x % 32;
        const u8 *row = row_address(address.rope, lane / 2);
        const i32 piece = static_cast<i32>(lane % 2);
        cp_async_or_zeros(stage + KEYS * K_BYTES + RopeRow::offset(lane / 2, piece), row + 16 * piece,
                          row && 16 * piece < rope_bytes());
    }
};

typedef float Scores[M_TILES][N_TILES][4];
typedef float Outputs[M_TILES][COLUMNS / 8][4];
typedef FragmentSoftmax<M_TILES, N_TILES> Softmax;  // of the rows `lane.tile_row(m, half)`

// Two values of a 16-bit type as two of the queries' type.
template <class Element>
__device__ __forceinline__ u32 as_query(u32 pair) {
    if constexpr (Element::IS_BF16 == Query::IS_BF16) return pair;
    return Query::pack(Element::load(static_cast<u16>(pair)), Element::load(static_cast<u16>(pair >> 16)));
}

// Adds the products of a fragment of queries with 16 elements of 16 keys, which are bytes or 16-bit elements of two
// registers for each 8 keys.
template <class Element>
__device__ __forceinline__ void multiply_keys(Scores &s, int m, int n, const u32 (&a)[4], u32 first, u32 second) {
    if constexpr (Element::IS_FP8) {
        Query::mma(s[m][n], a, Element::template widen<Query, 0, 1>(first),
                   Element::template widen<Query, 2, 3>(first));
    } else {
        Query::mma(s[m][n], a, as_query<Element>(first), as_query<Element>(second));
    }
}

// The value that lane 8n + 2 pair + i has, for the two keys of this thread's columns of key block n.
__device__ __forceinline__ float of_key(float of_lane, int n, u32 pair, int i) {
    return __shfl_sync(FULL_WARP, of_lane, 8 * n + 2 * pair + i);
}

// What a scale per key multiplies, in place.
__device__ __forceinline__ void multiply_by_key(Scores &s, float factor_of_lane, const Lane &lane) {
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float factor = of_key(factor_of_lane, n, lane.pair, i);
#pragma unroll
            for (int m = 0; m < M_TILES; m++) s[m][n][i] *= factor, s[m][n][i + 2] *= factor;
        }
    }
}

template <class Element>
__device__ __forceinline__ void multiply_latent(Scores &s, const Queries &q, u32 keys) {
    // Fragments of queries that go with 32 bytes of keys.
    constexpr int FRAGMENTS = Element::IS_FP8 ? 2 : 1;
#pragma unroll
    for (int step = 0; step < K_BYTES / 32; step++) {
        u32 second[FRAGMENTS][4];
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
            load_queries<Element, QRow>(second[f], query_fragment<Element, QRow>(q.latent, 16), FRAGMENTS * step + f);
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, KRow::step(keys, 2 * step) + 8 * n * KRow::BYTES_OF_ROW);
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++) {
                const u32(&first)[4] = q.first[FRAGMENTS * step + f];
                multiply_keys<Element>(s, 0, n, first, b[f], b[1]);
                multiply_keys<Element>(s, 0, n + 1, first, b[2 + f], b[3]);
                multiply_keys<Element>(s, 1, n, second[f], b[f], b[1]);
                multiply_keys<Element>(s, 1, n + 1, second[f], b[2 + f], b[3]);
            }
        }
    }
}

template <class Element>
__device__ __forceinline__ void multiply_rope(Scores &s, const Queries &q, u32 keys) {
    u32 a[M_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
        load_queries<Element, RopeRow>(a[m], query_fragment<Element, RopeRow>(q.rope, 16 * m), 0);
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
        u32 b[4];
        ldmatrix_x4(b, keys + 8 * n * RopeRow::BYTES_OF_ROW);
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            multiply_keys<Element>(s, m, n, a[m], b[0], b[1]);
            multiply_keys<Element>(s, m, n + 1, a[m], b[2], b[3]);
        }
    }
}

// Where the lane's fragments of a tile's slices are: of the first stage of the ring. To widen elements takes registers that
// addresses would have.
struct KeyFragments {
    u32 latent, rope, values;

    __device__ __forceinline__ explicit KeyFragments(u32 ring)
        : latent(kept(key_fragment<KRow>(ring))),
          rope(kept_if<!Latent::IS_FP8>(key_fragment<RopeRow>(ring + KEYS * K_BYTES))),
          values(kept_if<!Latent::IS_FP8>(value_fragment<KRow>(ring))) {}
};

// The warp's part of S = Q K^T of one tile, `stage` bytes behind the ring's first.
__device__ __forceinline__ void multiply_qk(Scores &s, const Queries &q, const KeyFragments &at, u32 stage, float scale,
                                            const Lane &lane) {
    multiply_latent<Latent>(s, q, at.latent + stage);
    if constexpr (Keys::SCALED) multiply_by_key(s, scale, lane);
    multiply_rope<Rope>(s, q, at.rope + stage);
}

// The warps' parts of the dot products of a tile. Pairs of keys lie so that half a warp reads from all banks.
struct Products {
    static __device__ __forceinline__ float2 *at(const Lane &lane, u32 warp, u32 buffer, u32 row, u32 n) {
        float *part = reinterpret_cast<float *>(lane.memory_of(warp) + PRODUCTS_AT + buffer * PRODUCTS_BYTES);
        const u32 swizzle = KEYS % 32 == 0 ? row & 3 : (row >> 1) & 1;
        return reinterpret_cast<float2 *>(part + row * KEYS + ((n ^ swizzle) << 3) + 2 * lane.pair);
    }

    static __device__ __forceinline__ void put(const Scores &s, const Lane &lane, u32 buffer) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int n = 0; n < N_TILES; n++) {
                    *at(lane, lane.warp, buffer, lane.tile_row(m, half), n) =
                        make_float2(s[m][n][2 * half], s[m][n][2 * half + 1]);
                }
            }
        }
    }

    // All warps add in the same order, so that all have the same sums.
    static __device__ __forceinline__ void sum(Scores &s, const Lane &lane, u32 buffer) {
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int n = 0; n < N_TILES; n++) {
                    float2 sum = *at(lane, 0, buffer, lane.tile_row(m, half), n);
#pragma unroll
                    for (u32 warp = 1; warp < WARPS; warp++) {
                        const float2 part = *at(lane, warp, buffer, lane.tile_row(m, half), n);
                        sum.x += part.x, sum.y += part.y;
                    }
                    s[m][n][2 * half] = sum.x, s[m][n][2 * half + 1] = sum.y;
                }
            }
        }
    }
};

__device__ __forceinline__ void multiply(Scores &s, float factor) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] *= factor;
        }
    }
}

// What a row may not see becomes -inf. Rows past the item's may see more: nobody looks at them.
__device__ __forceinline__ void hide(Scores &s, const FolioMlaParams &g, const Work &work, const Lane &lane,
                                     KeyRange keys, i32 first_key) {
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const i32 token = work.token(g, work.first_row + kept(lane.tile_row(m, half)));
            const KeyRange seen = {keys.begin, min(keys.end, work.end_of(g.attention, token))};
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const i32 key = first_key + 8 * n + 2 * static_cast<i32>(lane.pair) + i;
                    if (!seen.holds(key)) s[m][n][2 * half + i] = minus_infinity();
                }
            }
        }
    }
}

// The factor that all weights of a warp have, so that weights times the scales of fp8_ds_mla are numbers of fp16: the
// largest scale so far is 2^15 units.
struct WeightUnit {
    float unit = __uint_as_float(1u << 23);

    // For a tile's scales, the lane's key among them. Returns the factor for what was accumulated before.
    __device__ __forceinline__ float update(float scale) {
        const u32 largest = __reduce_max_sync(FULL_WARP, __float_as_uint(fabsf(scale)));
        const float before = unit;
        unit = fmaxf(unit, __uint_as_float(largest) * __uint_as_float((127u - 15u) << 23));
        return before / unit;
    }
};

// Weights times scales of keys are multiples of a unit that fp16 has no room above (WeightUnit).
constexpr float GROWTH = Keys::SCALED ? 0.0f : MOST_GROWTH;

// Takes over a tile's logits, which are `unit` times what is in s and become probabilities; rescales what was accumulated
// before, and that by `factor` too.
__device__ __forceinline__ void update(Softmax &softmax, Scores &s, Outputs &o, float unit, float factor) {
    float corrections[M_TILES][2];
    bool changes = false;
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            corrections[m][half] = softmax.update(s, m, half, unit, GROWTH) * factor;
            changes |= corrections[m][half] != 1.0f;
        }
    }
    rescale(o, corrections, changes);
}

// The end of a row: the output, whose type is that of the queries, and lse; or the partial results that plan/combine.cu
// combines where its keys were split.
struct OutputRow {
    Query::Storage *values;
    float *partial_values;  // null: `values`
    float *lse_at;
    float factor, lse;

    // `row` counts the item's rows, all heads. `unit` is what values are multiples of.
    __device__ __forceinline__ OutputRow(const FolioMlaParams &g, const FolioWorkItem &item, u32 row, RowState state,
                                         float unit)
        : values(nullptr), partial_values(nullptr) {
        const FolioAttentionParams &p = g.attention;
        const u32 token = divide(row, g.num_heads), head = row - token * p.num_qo_heads;
        factor = state.sum == 0.0f ? 0.0f : unit / state.sum;
        lse = log_sum_exp(state);
        if (item.partial != FOLIO_NO_PARTIAL) {
            const i64 at = (static_cast<i64>(item.partial) + token) * p.num_qo_heads + head;
            partial_values = p.plan.partial_o + at * g.kv_lora_rank;
            lse_at = p.plan.partial_lse + at;
            return;
        }
        const i64 out_token = static_cast<i64>(item.q_token) + token;
        values = static_cast<Query::Storage *>(p.o.data) + out_token * p.o.stride_token +
                 static_cast<i64>(head) * p.o.stride_head;
        lse_at = p.lse ? p.lse + out_token * p.lse_stride_token + head * p.lse_stride_head : nullptr;
        lse = lse_in_base(lse, p.flags);
        factor *= p.v_scale;
    }

    // Columns `column` (even) and the next.
    __device__ __forceinline__ void store(u32 column, float x, float y) const {
        if (partial_values) {
            *reinterpret_cast<float2 *>(partial_values + column) = make_float2(x * factor, y * factor);
            return;
        }
        const u32 pair = Query::pack(x * factor, y * factor);
        if (reinterpret_cast<u64>(values) % 4 == 0) {
            *reinterpret_cast<u32 *>(values + column) = pair;
        } else {
            values[column] = static_cast<u16>(pair), values[column + 1] = static_cast<u16>(pair >> 16);
        }
    }
};

__device__ __forceinline__ void store_rows(const FolioMlaParams &g, const Work &work, const Outputs &o,
                                           const Softmax &softmax, float unit, const Lane &lane) {
    const u32 num_rows = work.num_rows(g.attention);
#pragma unroll
    for (int m = 0; m < M_TILES; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 row = work.first_row + lane.tile_row(m, half);
            if (row >= num_rows) continue;
            const OutputRow out(g, *work.item, row, softmax.state[m][half], unit);
            if (lane.warp == 0 && lane.pair == 0 && out.lse_at) *out.lse_at = out.lse;
            for_each_pair<Latent>(o, m, half, lane.pair, [&](u32 column, float x, float y) {
                const u32 at = lane.warp * COLUMNS + column;
                if (at < g.kv_lora_rank) out.store(at, x, y);
            });
        }
    }
}

__device__ __forceinline__ void attend(const FolioMlaParams &g, const Work &work) {
    const FolioAttentionParams &p = g.attention;
    const Lane lane;
    const u32 ring = shared_address(lane.memory_of(lane.warp));
    const i32 first_token = work.token(g, work.first_row);
    const i32 last_token = work.token(g, min(work.first_row + ROWS, work.num_rows(p)) - 1);
    const i32 item_end = static_cast<i32>(work.item->kv_end);
    const KeyRange keys = {static_cast<i32>(work.item->kv_start), min(item_end, work.end_of(p, last_token))};
    const i32 seen_by_all = min(keys.end, work.end_of(p, first_token));
    KeyLoader loader(g, work, keys, lane);

    // Scales of the tiles that are on their way.
    float scales[STAGES - 1];
    Queries::copy(g, work, lane);
    scales[0] = loader.copy(ring);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    const Queries q(lane);
    __syncwarp();
    for (int stage = 1; stage < STAGES - 1; stage++) {
        scales[stage] = loader.copy(ring + stage * STAGE_BYTES);
        cp_async_commit();
    }

    const KeyFragments at(ring);
    const float scale = product_scale(p, 0) * LOG2_E;
    const float unit = scale > 0.0f ? scale : 1.0f;  // what the softmax multiplies by
    Softmax softmax;
    WeightUnit weights;
    Outputs o = {};
    i32 tile = keys.begin / KEYS;
    for (u32 stage = 0; tile * KEYS < keys.end; tile++) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        const float key_scale = scales[0];
#pragma unroll
        for (int i = 1; i < STAGES - 1; i++) scales[i - 1] = scales[i];
        scales[STAGES - 2] = loader.copy(ring + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES);
        cp_async_commit();

        Scores s = {};
        multiply_qk(s, q, at, stage * STAGE_BYTES, key_scale, lane);
        // One barrier a tile: a buffer is written again after the barrier of the next tile.
        Products::put(s, lane, tile % 2);
        __syncthreads();
        Products::sum(s, lane, tile % 2);
        const i32 first_key = tile * KEYS;
        if (scale <= 0.0f) multiply(s, scale);
        if (first_key < keys.begin || first_key + KEYS > seen_by_all) hide(s, g, work, lane, keys, first_key);
        update(softmax, s, o, unit, Keys::SCALED ? weights.update(key_scale) : 1.0f);
        if constexpr (Keys::SCALED) multiply_by_key(s, key_scale / weights.unit, lane);
        multiply_values<Query, Latent, KRow>(o, s, at.values + stage * STAGE_BYTES);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    allow_dependents();
    softmax.finish();
    store_rows(g, work, o, softmax, Keys::SCALED ? weights.unit : 1.0f, lane);
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 2) folio_mla(const __grid_constant__ FolioMlaParams g) {
    folio::wait_for_prerequisites();
    folio::Work work;
    if (work.load(g, blockIdx.x)) folio::attend(g, work);
}
