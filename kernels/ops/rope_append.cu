// From a projection to the attention: rows of queries and keys are normalised and rotated in fp32, queries are stored,
// keys and values go to a paged cache, rounded to fp8 where the cache is fp8. One launch, and every element is read once
// and written once to each output.
//
// A warp has some rows of every token that it takes, queries, keys or values, so that what depends on heads is worked out
// once. A row of queries or keys has a group of lanes, a power of two, and each lane 16 elements of it: eight pairs while
// RoPE lasts, and 16 neighbours behind. Values move in pieces that lie one after another. Warps are as many as run at a
// time; where tokens are more, warps take them in turn, and ask for three tokens ahead. Slots beyond the cache are skipped;
// positions beyond the table are those of its ends.
//
// With 32 and 8 heads of 128 in bf16 a token moves 12 KiB in and 12 KiB out, 10 KiB out where the cache is fp8.
//
// Compiled per pair of types: FOLIO_Q of the tokens, FOLIO_KV of the cache (that, or fp8).
#include "core/append.cuh"
#include "core/rope_rows.cuh"

namespace folio {

typedef FolioRopeAppendParams Params;
typedef FOLIO_Q Source;
typedef FOLIO_KV Cached;
typedef CacheRows<Cached> Cache;

constexpr u32 WARP = 32, WARPS = FOLIO_THREADS / WARP;

// --- tokens in turn ---------------------------------------------------------------------------------

// The tokens that a warp takes: every `stride`-th from `first` on, up to `end`.
struct Tokens {
    i64 first, stride, end;

    __device__ __forceinline__ i64 at(u32 n) const { return first + n * stride; }
};

// A number that each token has, 32 tokens at a time: a lane asks for that of one. Calls have n = 0, 1, 2 …
class NumberOfTokens {
public:
    // `load` gives that of a token.
    template <class F>
    __device__ __forceinline__ i64 at(const Tokens &tokens, u32 n, const F &load) {
        if (n % WARP == 0) {
            const i64 token = tokens.at(n + threadIdx.x % WARP);
            number = token < tokens.end ? load(token) : -1;
        }
        return __shfl_sync(FULL_WARP, number, n % WARP);
    }

private:
    i64 number;
};

// Vectors of a lane, and bytes of a warp's cosines and of its sines, that are fetched for a token.
constexpr u32 VECTORS = 4, ANGLE_BYTES = 512;

// What is on its way for a token. Vectors are the lane's own.
struct Stage {
    uint4 vectors[VECTORS][WARP];
    u8 angles[2][ANGLE_BYTES];

    __device__ __forceinline__ void fetch(u32 i, const void *source, bool is_there) {
        cp_async<16>(shared_address(&vectors[i][threadIdx.x % WARP]), source, is_there ? 16 : 0);
    }
    __device__ __forceinline__ uint4 take(u32 i) const { return vectors[i][threadIdx.x % WARP]; }
};

// Three tokens on their way beside the one that is computed: with unwritten lines in the L2 a load takes 3 us.
constexpr u32 STAGES = 4;
typedef Stage Stages[STAGES];

// Rows: fetch(stage, n) asks for what the n-th token needs, and move(stage, n) writes what comes of it.
template <class Rows>
__device__ __forceinline__ void move_in_turn(Rows &rows, const Tokens &tokens, Stages &stages) {
    // Asked for at one place: code comes from memory too.
#pragma unroll 1
    for (u32 fetched = 0;; fetched++) {
        if (tokens.at(fetched) < tokens.end) rows.fetch(stages[fetched % STAGES], fetched);
        cp_async_commit();
        if (fetched < STAGES - 1) continue;
        const u32 n = fetched - (STAGES - 1);
        if (tokens.at(n) >= tokens.end) return;
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // lanes read what others asked for
        rows.move(stages[n % STAGES], n);
        __syncwarp();  // all have read what is written next
    }
}

// --- queries and keys -------------------------------------------------------------------------------

// Where they come from and go to.
struct Rotated {
    const FolioRows &in, &out;        // a null out: nowhere
    const FolioAppendTensor *cached;  // null: queries
    const void *weight;
    u32 weight_dtype, num_heads;
};

// Where the cache has the first key of a token, or null.
__device__ __forceinline__ Cached::Storage *cached_token(const Params &p, i64 slot) {
    if (slot < 0 || slot >= p.append.num_slots) return nullptr;
    const CacheSlot at = place(p.append, slot);
    return Cache::row(p.append.k.cache, at.page, at.token, 0);
}

// Rows that a group has of a token: what they share, the angles above all, is found once for them.
constexpr u32 OF_PIECE = VECTOR * sizeof(Source::Storage) / 16, ROWS = VECTORS / (2 * OF_PIECE);

// A lane's first pieces of the rows of one tensor, of a token that moves on. A multiplication of strides for every row would
// take as long as its rotation.
template <class T>
struct MovingRows {
    typename T::Storage *first;
    i64 to_next_token, to_next_row;

    __device__ __forceinline__ MovingRows(const Params &p, const FolioRows &rows, const Tokens &tokens, u32 head,
                                          const Lane &lane)
        : first(rows.data ? row_of<T>(rows, tokens.first, head) + lane.pieces.begin[0] : nullptr),
          to_next_token(tokens.stride * rows.stride_token),
          to_next_row((WARP >> p.log2_lanes) * rows.stride_head) {}

    __device__ __forceinline__ void move_on() { first += to_next_token; }
};

// The rows that a warp's groups have of its tokens.
class RotatedRows {
public:
    __device__ __forceinline__ RotatedRows(const Params &p, const Rotated &of, u32 first_head, const Tokens &tokens)
        : p(p),
          of(of),
          tokens(tokens),
          head(first_head + (threadIdx.x % WARP >> p.log2_lanes)),
          lane(lane_of(p)),
          between_halves(lane.pieces.begin[1] - lane.pieces.begin[0]),
          in(p, of.in, tokens, head, lane),
          out(p, of.out, tokens, head, lane) {
        lane.group = FULL_WARP;  // all groups take part: exchanges among some lanes of a warp have to find out which
    }

    __device__ __forceinline__ void fetch(Stage &stage, u32 n) {
#pragma unroll
        for (u32 i = 0; i < VECTORS; i++) {
            const u32 row = i / (2 * OF_PIECE), half = i / OF_PIECE % 2;
            const Source::Storage *const piece = in.first + row * in.to_next_row + half * between_halves;
            stage.fetch(i, reinterpret_cast<const uint4 *>(piece) + i % OF_PIECE, exists(row, half));
        }
        in.move_on();
        if (!angles_are_fetched()) return;
        const u32 bytes = bytes_of_angle();
        const i64 at = bytes * place_of_angles(p, position_of(n), 0);
        const u32 vectors = p.rotary_dim / 2 * bytes / 16, number = threadIdx.x % WARP;
        if (number < vectors) {
            cp_async<16>(shared_address(stage.angles[0] + 16 * number),
                         static_cast<const u8 *>(p.cos) + at + 16 * number, 16);
            cp_async<16>(shared_address(stage.angles[1] + 16 * number),
                         static_cast<const u8 *>(p.sin) + at + 16 * number, 16);
        }
    }

    __device__ __forceinline__ void move(const Stage &stage, u32 n) {
        find_angles(stage, n);
        const i64 slot = of.cached ? slots.at(tokens, n, [&](i64 token) { return slot_index(p.append, token); }) : -1;
        Cached::Storage *cached = cached_token(p, slot);
        if (cached) cached += head * p.append.k.cache.stride_head + lane.pieces.begin[0];
        Source::Storage *to = out.first;
        // Not unrolled: the norm is long, and its weights would take registers for every row.
#pragma unroll 1
        for (u32 row = 0; row < ROWS; row++) {
            move_row(taken(stage, row), row, to, cached);
            if (to) to += out.to_next_row;
            if (cached) cached += (WARP >> p.log2_lanes) * p.append.k.cache.stride_head;
        }
        if (out.first) out.move_on();
    }

private:
    __device__ __forceinline__ u32 head_of(u32 row) const { return head + row * (WARP >> p.log2_lanes); }
    __device__ __forceinline__ bool exists(u32 row, u32 half) const {
        return head_of(row) < of.num_heads && lane.pieces.count[half] > 0;
    }

    // Angles of a table come with the rows, where a stage has room for them.
    __device__ __forceinline__ u32 bytes_of_angle() const {
        return p.cos_sin_dtype == FOLIO_F32 ? 4 : sizeof(Source::Storage);
    }
    __device__ __forceinline__ bool angles_are_fetched() const {
        return p.cos && p.rotary_dim / 2 * bytes_of_angle() <= ANGLE_BYTES;
    }
    __device__ __forceinline__ i64 position_of(u32 n) {
        return positions.at(tokens, n, [&](i64 token) { return folio::position_of(p, token); });
    }

    __device__ __forceinline__ void find_angles(const Stage &stage, u32 n) {
        const u32 first = VECTOR * lane.index;
        if (angles_are_fetched()) {
            if (!lane.is_rotated) return;
            if (p.cos_sin_dtype == FOLIO_F32) {
                read_angles<f32>(stage.angles[0], stage.angles[1], first);
            } else {
                read_angles<Source>(stage.angles[0], stage.angles[1], first);
            }
            return;
        }
        const i64 position = position_of(n);
        if (!lane.is_rotated) return;
        if (!p.cos) {
            compute_angles(p, position, first, lane.angles);
        } else if (p.cos_sin_dtype == FOLIO_F32) {
            read_angles<f32>(p.cos, p.sin, place_of_angles(p, position, first));
        } else {
            read_angles<Source>(p.cos, p.sin, place_of_angles(p, position, first));
        }
    }

    template <class T>
    __device__ __forceinline__ void read_angles(const void *cos, const void *sin, i64 at) {
        load_shared<T>(lane.angles.cos, static_cast<const typename T::Storage *>(cos) + at, VECTOR, true);
        load_shared<T>(lane.angles.sin, static_cast<const typename T::Storage *>(sin) + at, VECTOR, true);
    }

    static __device__ __forceinline__ RowPieces::Fetched<Source> taken(const Stage &stage, u32 row) {
        RowPieces::Fetched<Source> in;
#pragma unroll
        for (u32 i = 0; i < 2 * OF_PIECE; i++) {
            in.halves[i / OF_PIECE].elements.vectors[i % OF_PIECE] = stage.take(row * 2 * OF_PIECE + i);
        }
        return in;
    }

    __device__ __forceinline__ void move_row(const RowPieces::Fetched<Source> &in_row, u32 row, Source::Storage *to,
                                             Cached::Storage *cached) {
        lane.pieces.take(in_row);
        compute_row<Source>(p, lane, of.weight, of.weight_dtype, true);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            if (!exists(row, half)) continue;
            const float(&x)[VECTOR] = lane.pieces.x[half];
            if (to) Piece<Source>(x).elements.store(to + half * between_halves);
            if (cached) CacheRounding<Cached>(p.append.k, head_of(row)).vector(x).store(cached + half * between_halves);
        }
    }

    const Params &p;
    const Rotated &of;
    const Tokens &tokens;
    const u32 head;
    Lane lane;
    const u32 between_halves;
    MovingRows<Source> in, out;
    NumberOfTokens positions, slots;
};

// The same for rows that do not move in vectors: the lanes of a group take pairs in turn, and the elements behind.
class LooseRows {
public:
    __device__ __forceinline__ LooseRows(const Params &p, const Rotated &of, u32 first_head)
        : p(p),
          of(of),
          lanes(1u << p.log2_lanes),
          first(threadIdx.x & (lanes - 1)),
          wanted(first_head + (threadIdx.x % WARP >> p.log2_lanes)),
          head(min(wanted, of.num_heads - 1)),
          rounding(p.append.k, of.cached ? head : 0) {}

    __device__ __forceinline__ void move(const Tokens &tokens) {
#pragma unroll 1
        for (i64 token = tokens.first; token < tokens.end; token += tokens.stride) {
            in = row_of<Source>(of.in, token, head);
            out = of.out.data && wanted == head ? row_of<Source>(of.out, token, head) : nullptr;
            cached = of.cached && wanted == head ? cached_token(p, slot_index(p.append, token)) : nullptr;
            if (cached) cached += head * p.append.k.cache.stride_head;
            // Every lane has read the row when the first of them writes.
            if (of.weight) factor = norm_factor(p, squares(), lanes, FULL_WARP);
            rotate(p.rotary_dim > 0 ? position_of(p, token) : 0);
#pragma unroll 1
            for (u32 d = p.rotary_dim + first; d < p.append.k.head_dim; d += lanes) put(d, number(d));
        }
    }

private:
    __device__ __forceinline__ float squares() const {
        float sum = 0.0f;
#pragma unroll 1
        for (u32 d = first; d < p.append.k.head_dim; d += lanes) sum += Source::load(in[d]) * Source::load(in[d]);
        return sum;
    }

    __device__ __forceinline__ void rotate(i64 position) const {
        const u32 pairs = p.rotary_dim / 2;
#pragma unroll 1
        for (u32 pair = first; pair < pairs; pair += lanes) {
            const u32 a = p.is_interleaved ? 2 * pair : pair, b = p.is_interleaved ? a + 1 : pairs + pair;
            float x = number(a), y = number(b), cos, sin;
            if (p.cos) {
                const i64 at = place_of_angles(p, position, pair);
                cos = number_of(p.cos, p.cos_sin_dtype, at), sin = number_of(p.sin, p.cos_sin_dtype, at);
            } else {
                compute_angle(p, position, pair, cos, sin);
            }
            turn(x, y, cos, sin);
            put(a, x);
            put(b, y);
        }
    }

    // fp32, or of the tokens' type.
    static __device__ __forceinline__ float number_of(const void *numbers, u32 dtype, i64 index) {
        if (dtype == FOLIO_F32) return static_cast<const float *>(numbers)[index];
        return Source::load(static_cast<const Source::Storage *>(numbers)[index]);
    }

    // Normalised.
    __device__ __forceinline__ float number(u32 d) const {
        const float x = Source::load(in[d]);
        return of.weight ? x * factor * number_of(of.weight, of.weight_dtype, d) : x;
    }

    __device__ __forceinline__ void put(u32 d, float x) const {
        if (out) out[d] = Source::store(x);
        if (cached) cached[d] = rounding.element(x);
    }

    const Params &p;
    const Rotated &of;
    const u32 lanes, first, wanted, head;
    const CacheRounding<Cached> rounding;
    const Source::Storage *in;
    Source::Storage *out;
    Cached::Storage *cached;
    float factor;
};

// --- values -----------------------------------------------------------------------------------------

// Pieces of a token's values that a lane has.
constexpr u32 PIECES = VECTORS / OF_PIECE;

typedef AppendPiece<VECTOR, Source, Cached> ValuePiece;

// A warp's values, in pieces that lie one after another.
class Values {
public:
    __device__ __forceinline__ Values(const FolioAppendParams &p, u32 unit, const Tokens &tokens)
        : p(p), tokens(tokens), first(unit * PIECES * WARP + threadIdx.x % WARP) {}

    __device__ __forceinline__ void fetch(Stage &stage, u32 n) const {
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            const auto *const from = reinterpret_cast<const uint4 *>(piece(i).source(p.v, tokens.at(n)));
#pragma unroll
            for (u32 j = 0; j < OF_PIECE; j++) stage.fetch(i * OF_PIECE + j, from + j, exists(i));
        }
    }

    __device__ __forceinline__ void move(const Stage &stage, u32 n) {
        const i64 slot = slots.at(tokens, n, [&](i64 token) { return slot_index(p, token); });
        if (slot < 0 || slot >= p.num_slots) return;
        const CacheSlot at = place(p, slot);
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            if (!exists(i)) continue;
            Elements<VECTOR, Source> in;
#pragma unroll
            for (u32 j = 0; j < OF_PIECE; j++) in.vectors[j] = stage.take(i * OF_PIECE + j);
            const ValuePiece piece = this->piece(i);
            piece.store(p.v, at, in, CacheRounding<Cached>(p.v, piece.head));
        }
    }

private:
    __device__ __forceinline__ u32 all() const { return p.num_kv_heads * p.v.pieces.divisor; }
    __device__ __forceinline__ bool exists(u32 i) const { return first + i * WARP < all(); }
    __device__ __forceinline__ ValuePiece piece(u32 i) const {
        return ValuePiece(p.v, min(first + i * WARP, all() - 1));
    }

    const FolioAppendParams &p;
    const Tokens &tokens;
    const u32 first;
    NumberOfTokens slots;
};

// Values that do not move in vectors, element by element.
__device__ __forceinline__ void move_loose_values(const FolioAppendParams &p, u32 unit, const Tokens &tokens) {
    const u32 end = min((unit + 1) * PIECES * WARP, p.num_kv_heads * p.v.pieces.divisor);
#pragma unroll 1
    for (i64 token = tokens.first; token < tokens.end; token += tokens.stride) {
        const i64 slot = slot_index(p, token);
        if (slot < 0 || slot >= p.num_slots) continue;
        const CacheSlot at = place(p, slot);
#pragma unroll 1
        for (u32 i = unit * PIECES * WARP + threadIdx.x % WARP; i < end; i += WARP) {
            const AppendPiece<1, Source, Cached> piece(p.v, i);
            piece.store(p.v, at, piece.load(p.v, token), CacheRounding<Cached>(p.v, piece.head));
        }
    }
}

// --- what a warp has --------------------------------------------------------------------------------

// A warp's unit of a token: of those of queries, then of keys, then of values. src/cuda/ops/rope_append.rs counts them too.
__device__ __forceinline__ void move_unit(const Params &p, u32 unit, i64 first, i64 stride, Stages &stages) {
    const FolioAppendParams &a = p.append;
    const u32 rows = ROWS * (WARP >> p.log2_lanes);
    const u32 of_queries = (p.num_q_heads + rows - 1) / rows, of_keys = (a.num_kv_heads + rows - 1) / rows;
    const bool are_queries = unit < of_queries;
    const Tokens tokens = {first, stride, are_queries ? p.num_q_rows : a.num_tokens};
    if (unit < of_queries + of_keys) {
        const Rotated of = {are_queries ? p.q : a.k.source,
                            are_queries ? p.q_out : p.key_out,
                            are_queries ? nullptr : &a.k,
                            are_queries ? p.q_weight : p.k_weight,
                            are_queries ? p.q_weight_dtype : p.k_weight_dtype,
                            are_queries ? p.num_q_heads : a.num_kv_heads};
        const u32 first_head = (are_queries ? unit : unit - of_queries) * rows;
        if (p.vectors) {
            RotatedRows rotated(p, of, first_head, tokens);
            move_in_turn(rotated, tokens, stages);
        } else {
#pragma unroll 1
            for (u32 i = 0; i < ROWS; i++) LooseRows(p, of, first_head + i * rows / ROWS).move(tokens);
        }
    } else if (a.vectors) {
        Values values(a, unit - of_queries - of_keys, tokens);
        move_in_turn(values, tokens, stages);
    } else {
        move_loose_values(a, unit - of_queries - of_keys, tokens);
    }
}

// CTAs of a multiprocessor, which src/cuda/ops/rope_append.rs launches where tokens are many.
constexpr u32 BLOCKS = 4;

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::BLOCKS)
    folio_rope_append(const __grid_constant__ FolioRopeAppendParams p) {
    using namespace folio;
    __shared__ Stages stages[WARPS];
    allow_dependents();  // what attends to the tokens prepares itself meanwhile
    wait_for_prerequisites();
    const u32 warp = blockIdx.x * WARPS + threadIdx.x / WARP, at_once = divide(gridDim.x * WARPS, p.units_of_token);
    const u32 token = divide(warp, p.units_of_token), unit = warp - token * p.units_of_token.divisor;
    if (token < at_once) move_unit(p, unit, token, at_once, stages[threadIdx.x / WARP]);
}
