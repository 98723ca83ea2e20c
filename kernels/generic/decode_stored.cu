// Decode for sm_80 and up with fp16 or bf16 queries over caches in other forms than rows of plain elements. Rows, work items
// and warps are divided as in attention.cu's decode: each warp has every WARPS-th tile of keys, and a ring of its own.
//
// Rows are multiplied as they are stored: ldmatrix reads bytes and nibbles, and a lane widens its fragments in registers,
// exactly (stored_pairs.cuh). The form is known at run time, and asked twice for a tile: before the products with keys and
// before those with values. The rest of the loop is the same for all.
//
// Scales go where they are exact or nearly so:
//   token and head: that of a key multiplies its products, that of a value its probability;
//   channel: keys' multiply the queries, which become sums of two fp16 numbers each; values' multiply columns of the output.
//     Zero points become one number for each row of queries, q . (scale * zero), and one for each column, zero * sum of
//     probabilities;
//   block (NVFP4): in the numbers that are multiplied.
// So a score has an error of 2^-22 of its terms by channel scales, and no other form adds any to what fp16 probabilities have
// anyway. Packed keys are of the queries' type, and so are their probabilities.
//
// Compiled once per row of the kernel table, with FOLIO_Q (f16, bf16), FOLIO_HEAD_DIM_QK, FOLIO_HEAD_DIM_VO (padded dims),
// FOLIO_Q_TILE (rows), FOLIO_KV_TILE (keys), FOLIO_THREADS, FOLIO_SHARED_BYTES.
#include "core/stored_rows.cuh"
#include "generic/score_bias.cuh"
#include "generic/scores.cuh"
#include "generic/stored_channels.cuh"
#include "generic/stored_output.cuh"
#include "generic/stored_pairs.cuh"
#include "generic/stored_ring.cuh"

namespace folio {

typedef FOLIO_Q Query;
typedef FolioStoredAttentionParams Params;

constexpr int DIM = FOLIO_HEAD_DIM_QK, ROWS = FOLIO_Q_TILE, KEYS = FOLIO_KV_TILE, WARPS = FOLIO_THREADS / 32;
// Products are skipped beyond the problem's columns in so many at a time.
constexpr int PART = 64;
static_assert(DIM == FOLIO_HEAD_DIM_VO && DIM % PART == 0, "parts of columns");
static_assert(ROWS == 16 && KEYS % 16 == 0 && KEYS <= 32, "a fragment of rows, and a lane for each key");

typedef TileRow<2 * DIM> QRow;
typedef StoredRing<KEYS, DIM> Ring;
typedef StoredLoader<Query, KEYS, DIM> Loader;

// Shared memory: queries in two 16-bit numbers, two numbers of each row, and rings.
constexpr int Q_BYTES = ROWS * 2 * DIM, QUERY_BYTES = 2 * Q_BYTES + 128;
static_assert(FOLIO_SHARED_BYTES == QUERY_BYTES + WARPS * Ring::BYTES, "the kernel table's shared memory");
static_assert(SharedStates<WARPS, ROWS, DIM>::BYTES <= FOLIO_SHARED_BYTES, "states of all warps");

extern __shared__ __align__(128) u8 shared_memory[];
__shared__ KeyRange row_keys[ROWS];

// Where a thread stands: every warp has all rows.
struct Lane {
    u32 warp, row, pair;

    __device__ __forceinline__ Lane() : warp(threadIdx.x / 32), row(threadIdx.x % 32 / 4), pair(threadIdx.x % 4) {}

    __device__ __forceinline__ u32 seldom_tile_row(int, int half) const { return kept(8 * half + row); }
};

typedef float Scores[1][KEYS / 8][4];
typedef float Outputs[1][DIM / 8][4];
typedef FragmentSoftmax<1, KEYS / 8> Softmax;

// Pairs of a word of its elements, and its rows in shared memory.
template <class Kind>
struct Tiles {
    static constexpr int PAIRS = 16 / Kind::BITS, STAGES = Kind::BY_HEAD ? 1 : 2;
    typedef TileRow<DIM * Kind::BITS / 8> Row;
};

// Calls use(kind): what is asked of a form is then known to the compiler.
template <class Use>
__device__ __forceinline__ void with_kind(const FolioStoredFormat &format, const Use &use) {
    switch (format.form) {
        case FOLIO_FORM_TOKEN_HEAD_SCALES:
            if (format.element == FOLIO_I8) {
                use(StoredKind<FOLIO_FORM_TOKEN_HEAD_SCALES, FOLIO_I8>());
            } else {
                use(StoredKind<FOLIO_FORM_TOKEN_HEAD_SCALES, FOLIO_E4M3>());
            }
            break;
        case FOLIO_FORM_CHANNEL_SCALES: use(StoredKind<FOLIO_FORM_CHANNEL_SCALES, FOLIO_I8>()); break;
        case FOLIO_FORM_CHANNEL_ZERO_POINTS: use(StoredKind<FOLIO_FORM_CHANNEL_ZERO_POINTS, FOLIO_I4>()); break;
        case FOLIO_FORM_NVFP4: use(StoredKind<FOLIO_FORM_NVFP4, FOLIO_E2M1>()); break;
        default: use(StoredKind<FOLIO_FORM_PACKED_KEYS, Query::IS_BF16 ? FOLIO_BF16 : FOLIO_F16>()); break;
    }
}

// --- products ---------------------------------------------------------------------------------------

// Factors of NVFP4's elements in words of keys: those of a lane's key lie side by side.
struct KeyBlocks {
    u32 scales, shift;

    __device__ __forceinline__ KeyBlocks(u32 k_tile, const Lane &lane)
        : scales(k_tile + Ring::SCALES_OFFSET + lane.row * Ring::SCALES_OF_ROW), shift(lane.pair / 2 * 8) {}

    // The lane's of columns [64 part, + 64) of key 8 n + row: byte 0 is that of the first 32.
    __device__ __forceinline__ u32 of_part(int n, int part) const {
        return ld_shared(scales + 8 * n * Ring::SCALES_OF_ROW + 4 * part) >> shift;
    }

    static __device__ __forceinline__ u32 factors(u32 blocks, int half) {
        return e2m1_factors(__byte_perm(blocks, 0, half == 0 ? 0x0000 : 0x2020));
    }
};

// The same in words of values, which have two tokens.
struct ValueBlocks {
    u32 scales, selector;

    __device__ __forceinline__ ValueBlocks(u32 v_tile, const Lane &lane)
        : scales(v_tile + Ring::SCALES_OFFSET + 2 * lane.pair * Ring::SCALES_OF_ROW),
          selector(lane.row / 4 * 0x1010 + 0x4000) {}

    // Tokens 8 n + 2 pair and the next.
    __device__ __forceinline__ uint2 of_part(int n, int part) const {
        const u32 at = scales + 8 * n * Ring::SCALES_OF_ROW + 4 * part;
        return {ld_shared(at), ld_shared(at + Ring::SCALES_OF_ROW)};
    }

    __device__ __forceinline__ u32 factors(uint2 blocks, int half) const {
        return e2m1_factors(__byte_perm(blocks.x, blocks.y, selector + (half == 0 ? 0 : 0x2020)));
    }
};

// S += Q K^T of one tile, with keys that are widened. Two chunks of 16 bytes are PAIRS steps of 16 columns.
template <class Kind>
__device__ __forceinline__ void multiply_qk(Scores &s, u32 query_at, u32 k_tile, u32 dim, const Lane &lane) {
    typedef typename Tiles<Kind>::Row Row;
    constexpr int PAIRS = Tiles<Kind>::PAIRS, CHUNKS = PART / (8 * PAIRS), NUMBERS = Kind::BY_CHANNEL ? 2 : 1;
    const u32 key_at = key_fragment<Row>(k_tile);
    const KeyBlocks blocks(k_tile, lane);
    const PairsOf<Kind::ELEMENT> pairs;
    // Not unrolled: instructions are waited for as well.
#pragma unroll 1
    for (int part = 0; part * PART < dim; part++) {
        const u32 keys_of_part = Row::step(key_at, part * CHUNKS), queries_of_part = QRow::step(query_at, 8 * part);
        u32 scales[KEYS / 8] = {};
        if constexpr (Kind::BY_BLOCK) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) scales[n] = blocks.of_part(n, part);
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
            u32 b[KEYS / 16][4];
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                ldmatrix_x4(b[n], Row::step(keys_of_part, chunk) + 16 * n * Row::BYTES_OF_ROW);
            }
#pragma unroll
            for (int step = 0; step < PAIRS; step++) {
                const int second = step / (PAIRS / 2), pair = step % (PAIRS / 2) * 2;
                u32 a[NUMBERS][4];
#pragma unroll
                for (int i = 0; i < NUMBERS; i++) {
                    ldmatrix_x4(a[i], QRow::step(queries_of_part, chunk * PAIRS + 2 * step) + i * Q_BYTES);
                }
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
                    const u32 word = b[n / 2][n % 2 * 2 + second];
                    const u32 factors = Kind::BY_BLOCK ? KeyBlocks::factors(scales[n], second) : 0;
                    const u32 b0 = pairs(word, pair, factors), b1 = pairs(word, pair + 1, factors);
#pragma unroll
                    for (int i = 0; i < NUMBERS; i++) f16::mma(s[0][n], a[i], b0, b1);
                }
            }
        }
    }
}

// The same with packed keys, which are of the queries' type.
__device__ __forceinline__ void multiply_packed_qk(Scores &s, u32 query_at, u32 k_tile, u32 dim) {
    typedef PackedKeys<KEYS> Packed;
    const KeyFragment at;
    const u32 key_at = k_tile + Packed::offset(at.key, at.chunk);
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        if (step > 0 && step * 16 % PART == 0 && step * 16 >= dim) break;
        u32 a[4];
        ldmatrix_x4(a, QRow::step(query_at, 2 * step));
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            u32 b[4];
            ldmatrix_x4(b, key_at + Packed::offset(16 * n, 2 * step));
            Query::mma(s[0][2 * n], a, b[0], b[1]);
            Query::mma(s[0][2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Probabilities as fragments.
template <class T>
struct Weights {
    u32 a[KEYS / 16][4];

    __device__ __forceinline__ explicit Weights(const Scores &p) {
#pragma unroll
        for (int t = 0; t < KEYS / 16; t++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *const pair = p[0][2 * t + i / 2] + i % 2 * 2;
                a[t][i] = T::pack(pair[0], pair[1]);
            }
        }
    }
};

// O += P V of one tile, with values that are widened. Fragment n of the outputs has the columns that `column_of_values`
// says.
template <class Kind>
__device__ __forceinline__ void multiply_pv(Outputs &o, const Scores &p, u32 v_tile, u32 dim, const Lane &lane) {
    typedef typename Tiles<Kind>::Row Row;
    constexpr int PAIRS = Tiles<Kind>::PAIRS, CHUNKS = PART / (8 * PAIRS);
    const Weights<f16> weights(p);
    const u32 value_at = value_fragment<Row>(v_tile);
    const ValueBlocks blocks(v_tile, lane);
    const PairsOf<Kind::ELEMENT> pairs;
#pragma unroll
    for (int part = 0; part < DIM / PART; part++) {
        if (part > 0 && part * PART >= dim) break;
#pragma unroll
        for (int t = 0; t < KEYS / 16; t++) {
            uint2 scales[2] = {};
            if constexpr (Kind::BY_BLOCK) {
                scales[0] = blocks.of_part(2 * t, part), scales[1] = blocks.of_part(2 * t + 1, part);
            }
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
                u32 b[4];
                ldmatrix_x4_trans(b, Row::step(value_at, part * CHUNKS + chunk) + 16 * t * Row::BYTES_OF_ROW);
#pragma unroll
                for (int second = 0; second < 2; second++) {
                    u32 factors[2] = {};
                    if constexpr (Kind::BY_BLOCK) {
                        factors[0] = blocks.factors(scales[0], second), factors[1] = blocks.factors(scales[1], second);
                    }
#pragma unroll
                    for (int j = 0; j < PAIRS; j++) {
                        f16::mma(o[0][(part * CHUNKS + chunk + second) * PAIRS + j], weights.a[t],
                                 pairs(b[2 * second], j, factors[0]), pairs(b[2 * second + 1], j, factors[1]));
                    }
                }
            }
        }
    }
}

// The same with packed values, which are of the queries' type and lie by columns: they are fragments as keys are.
__device__ __forceinline__ void multiply_packed_pv(Outputs &o, const Scores &p, u32 v_tile, u32 dim) {
    typedef PackedValues<DIM> Packed;
    const Weights<Query> weights(p);
    const KeyFragment at;
    const u32 value_at = v_tile + Packed::offset(at.key, at.chunk);
#pragma unroll
    for (int d = 0; d < DIM / 16; d++) {
        if (d > 0 && d * 16 % PART == 0 && d * 16 >= dim) break;
#pragma unroll
        for (int t = 0; t < KEYS / 16; t++) {
            u32 b[4];
            ldmatrix_x4(b, value_at + Packed::offset(16 * d, 2 * t));
            Query::mma(o[0][2 * d], weights.a[t], b[0], b[1]);
            Query::mma(o[0][2 * d + 1], weights.a[t], b[2], b[3]);
        }
    }
}

// --- scales of tokens -------------------------------------------------------------------------------

// Multiplies the columns of a tile by their keys' factors.
__device__ __forceinline__ void scale_keys(Scores &s, u32 factors, const Lane &lane, float common) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) {
        const uint2 two = ld_shared_v2(factors + (8 * n + 2 * lane.pair) * 4);
        const float x = __uint_as_float(two.x) * common, y = __uint_as_float(two.y) * common;
        s[0][n][0] *= x, s[0][n][1] *= y, s[0][n][2] *= x, s[0][n][3] *= y;
    }
}

// The scale of a value goes into its probability. fp16 holds the products relative to a power of two, the least that is not
// below the largest scale so far.
struct ValueScales {
    float unit = 0.0f, inverse = 0.0f;

    // Takes over a tile's scales, and multiplies its probabilities by them.
    __device__ __forceinline__ void apply(Scores &p, Outputs &o, u32 factors, const Lane &lane) {
        const float own = fabsf(__uint_as_float(ld_shared(factors + threadIdx.x % KEYS * 4)));
        if (__any_sync(FULL_WARP, own > unit)) grow(o, own);
        scale_keys(p, factors, lane, inverse);
    }

private:
    __device__ __forceinline__ void grow(Outputs &o, float own) {
        const float wanted = power_of_two_above(warp_max(own)), factor = unit / wanted;
        unit = wanted, inverse = 1.0f / wanted;
#pragma unroll
        for (int d = 0; d < DIM / 8; d++) {
#pragma unroll
            for (int i = 0; i < 4; i++) o[0][d][i] *= factor;
        }
    }
};

// --- a work item ------------------------------------------------------------------------------------

// What a row of queries is divided by, and what zero points add to its scores in that unit.
struct RowOfQueries {
    float unit, bias;
};

__device__ __forceinline__ RowOfQueries *rows_of_queries() {
    return reinterpret_cast<RowOfQueries *>(shared_memory + 2 * Q_BYTES);
}

// Eight elements of a row from d on, times their scales.
__device__ __forceinline__ void load_queries(float (&x)[VECTOR], const FolioGenericParams &g, const Work &work, u32 row,
                                             u32 d, const Channels &channels) {
    const i64 token = static_cast<i64>(work.item->q_token) + row / work.group;
    const u32 head = work.kv_head * work.group + row % work.group;
    Piece<Query> q;
    q.load(row_of<Query>(g.attention.q, token, head) + d, VECTOR, g.q_copy_bytes == 16);
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) x[i] = channels.scales ? q[i] * channels.scales[d + i] : q[i];
}

// A warp writes every WARPS-th row as sums of two numbers, in the order of the cache's elements. In fp16, the row's largest
// element is brought below 2^10: what is 2^-24 of it is not denormal, and neither are the rests of larger ones.
template <class T, bool IN_UNITS>
__device__ __forceinline__ void write_queries(const FolioGenericParams &g, const Work &work, const Channels &channels,
                                              u32 log2_pairs) {
    static_assert(DIM <= 32 * VECTOR, "a lane has eight elements");
    const u32 q_tile = shared_address(shared_memory), d = threadIdx.x % 32 * VECTOR;
#pragma unroll 1
    for (u32 tile_row = threadIdx.x / 32; tile_row < ROWS; tile_row += WARPS) {
        const u32 row = work.first_row + tile_row;
        const bool exists = row < work.num_rows && d < g.head_dim_qk;
        float x[VECTOR] = {}, largest = 0.0f, bias = 0.0f;
        if (exists) load_queries(x, g, work, row, d, channels);
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) largest = fmaxf(largest, fabsf(x[i]));
        const float unit = IN_UNITS ? power_of_two_above(fmaxf(warp_max(largest), 0x1p-60f)) * 0x1p-10f : 1.0f;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            const float y = x[i] * (1.0f / unit);
            const u16 high = T::store(y), low = T::store(y - T::load(high));
            // Of what is multiplied, so that its error goes by q . k and not by what cancels.
            if (exists && channels.zeros) bias += (T::load(high) + T::load(low)) * channels.zeros[d + i];
            const u32 place = place_in_queries(d + i, log2_pairs);
            const u32 to = q_tile + QRow::offset(tile_row, place / 8) + place % 8 * 2;
            if (d < DIM) st_shared_half(to, high), st_shared_half(to + Q_BYTES, low);
        }
        bias = warp_sum(bias);
        if (threadIdx.x % 32 == 0) rows_of_queries()[tile_row] = {unit, bias};
    }
}

// Until the copies before the latest three or one are here: keys and values come by turns, STAGES tiles ahead.
template <class Kind>
__device__ __forceinline__ void await_copies() {
    cp_async_wait<2 * Tiles<Kind>::STAGES - 1>();
    __syncwarp();
}

// Values times `unit`.
__device__ __forceinline__ void store_states(const Outputs &o, const Softmax &softmax, float unit, const Lane &lane,
                                             u32 log2_pairs) {
    const SharedStates<WARPS, ROWS, DIM> states(shared_memory);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const u32 row = 8 * half + lane.row;
        if (lane.pair == 0) states.state(lane.warp, row) = softmax.state[0][half];
        float *const values = states.row(lane.warp, row);
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                values[column_of_values(n, 2 * lane.pair + i, log2_pairs)] = o[0][n][2 * half + i] * unit;
        }
    }
}

// One warp's part of a work item: every WARPS-th tile of keys.
struct Decode {
    const Params &params;
    const Work &work;
    Lane lane;
    Ring ring;
    KeyRange keys;
    i32 tile;
    Loader loader;
    int stages;
    u32 query_at, stage, next_stage;  // a stage as in StoredRing; what leads to the next by XOR
    Outputs o;
    Softmax softmax;
    ValueScales value_scales;

    __device__ __forceinline__ Decode(const Params &params, const Work &work)
        : params(params),
          work(work),
          ring{shared_address(shared_memory) + QUERY_BYTES + lane.warp * Ring::BYTES},
          keys(visible_keys(params.generic.attention, work.request, *work.item, work.token(0), work.token(ROWS - 1))),
          tile(keys.begin / KEYS + static_cast<i32>(lane.warp)),
          loader(params, work, keys, tile),
          stages(params.cache.format.form == FOLIO_FORM_PACKED_KEYS ? 1 : 2),
          query_at(kept(query_fragment<Query, QRow>(shared_address(shared_memory), 0))),
          stage(0),
          next_stage(stages == 2 ? Ring::STAGE_BYTES : 0),
          o() {}

    // There is a tile, `ahead` of the warp's tiles further.
    __device__ __forceinline__ bool exists(i32 ahead = 0) const { return (tile + ahead * WARPS) * KEYS < keys.end; }

    __device__ __forceinline__ KeyRange span() const { return {tile * KEYS, tile * KEYS + KEYS}; }

    // Starts the first copies: of one tile, or of two.
    __device__ __forceinline__ void begin() {
#pragma unroll 1
        for (int ahead = 0; ahead < stages; ahead++) copy_keys(ahead), copy_values(ahead), stage ^= next_stage;
    }

    // The products with the keys of a tile.
    template <class Kind>
    __device__ __forceinline__ void score(Scores &s) {
        await_copies<Kind>();
        const u32 dim = params.generic.head_dim_qk, k_tile = ring.keys(stage);
        if constexpr (Kind::BY_HEAD) {
            multiply_packed_qk(s, query_at, k_tile, dim);
        } else {
            multiply_qk<Kind>(s, query_at, k_tile, dim, lane);
        }
        if constexpr (Kind::BY_TOKEN) scale_keys(s, ring.key_factors(stage), lane, 1.0f);
    }

    // The products with its values.
    template <class Kind>
    __device__ __forceinline__ void accumulate(Scores &s) {
        await_copies<Kind>();
        const u32 dim = params.generic.head_dim_vo, v_tile = ring.values(stage);
        if constexpr (Kind::BY_TOKEN) value_scales.apply(s, o, ring.value_factors(stage), lane);
        if constexpr (Kind::BY_HEAD) {
            if (span().begin < keys.begin || span().end > keys.end) {
                clear_hidden<KEYS, DIM>(v_tile, keys, span().begin);
                __syncwarp();
            }
            multiply_packed_pv(o, s, v_tile, dim);
        } else {
            multiply_pv<Kind>(o, s, v_tile, dim, lane);
        }
    }

    // Keys of the tile that is `ahead` further take the place of those that all lanes have done with.
    __device__ __forceinline__ void copy_keys(int ahead) {
        __syncwarp();
        if (exists(ahead)) loader.copy_keys(ring, stage);
        cp_async_commit();
    }

    __device__ __forceinline__ void copy_values(int ahead) {
        __syncwarp();
        if (exists(ahead)) loader.copy_values(ring, stage), loader.advance(WARPS);
        cp_async_commit();
    }

    __device__ __forceinline__ void advance() { tile += WARPS, stage ^= next_stage; }
};

// What `with_kind` calls.
struct Score {
    Decode &decode;
    Scores &s;
    template <class Kind>
    __device__ __forceinline__ void operator()(Kind) const {
        decode.score<Kind>(s);
    }
};

struct Accumulate {
    Decode &decode;
    Scores &s;
    template <class Kind>
    __device__ __forceinline__ void operator()(Kind) const {
        decode.accumulate<Kind>(s);
    }
};

__device__ __forceinline__ void attend(const Params &params, const Work &work) {
    const FolioGenericParams &g = params.generic;
    const FolioAttentionParams &p = g.attention;
    const FolioStoredFormat format = {kept(params.cache.format.form), kept(params.cache.format.element)};
    Decode decode(params, work);
    const Lane &lane = decode.lane;
    const KeyRange keys = decode.keys;
    decode.begin();
    write_row_keys(row_keys, p, work);
    const bool packed = format.form == FOLIO_FORM_PACKED_KEYS;
    const u32 log2_pairs = packed ? 0 : log2_pairs_of_word(format.element);
    const Channels of_keys(params.cache.k, format.form, work.kv_head);
    if (packed) {
        write_queries<Query, false>(g, work, of_keys, log2_pairs);
    } else {
        write_queries<f16, true>(g, work, of_keys, log2_pairs);
    }
    __syncthreads();

    const float of_numbers = packed ? 1.0f : 1.0f / unit_of_numbers(format.element);
    const RowOfQueries rows[2] = {rows_of_queries()[lane.row], rows_of_queries()[lane.row + 8]};
    const KeyRange of_all = keys_of_all_rows(row_keys, p, work, 0, ROWS, keys);
    const Logits logits(p, work, g.bias.data);
    const float units[2] = {rows[0].unit * of_numbers, rows[1].unit * of_numbers};
    const bool folded = logits.are_products;
    const RowUnits<1> logit_units = {
        {folded ? logits.scale * units[0] : 1.0f, folded ? logits.scale * units[1] : 1.0f}};
    while (decode.exists()) {
        const KeyRange span = decode.span();
        Scores s;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) s[0][n][i] = -rows[i / 2].bias;
        }
        with_kind(format, Score{decode, s});
        decode.copy_keys(decode.stages);
        if (!logits.are_products) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) s[0][n][i] *= units[i / 2];
            }
            apply_rule(s, p, work, logits, lane, span.begin);
        }
        if (span.begin < of_all.begin || span.end > of_all.end) hide(s, row_keys, p, work, lane, keys, span.begin);
        if (is_biased(g.bias, work.request, span)) add_bias(s, g.bias, work, 0, span.begin);
        update(decode.softmax, s, decode.o, logit_units);
        with_kind(format, Accumulate{decode, s});
        decode.copy_values(decode.stages);
        decode.advance();
    }
    allow_dependents();
    decode.softmax.finish();
    cp_async_wait<0>();
    __syncthreads();
    const bool by_token = format.form == FOLIO_FORM_TOKEN_HEAD_SCALES;
    store_states(decode.o, decode.softmax, (by_token ? decode.value_scales.unit : 1.0f) * of_numbers, lane, log2_pairs);
    __syncthreads();
    const Channels of_values(params.cache.v, format.form, work.kv_head);
    SharedStates<WARPS, ROWS, DIM>(shared_memory).store(g, work, of_values);
}

constexpr int BLOCKS = DIM > 128 ? 2 : 3;

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::BLOCKS)
    folio_attention_stored(const __grid_constant__ FolioStoredAttentionParams params) {
    folio::wait_for_prerequisites();
    folio::Work work;
    if (work.load(params.generic, blockIdx.x, folio::ROWS)) folio::attend(params, work);
}
