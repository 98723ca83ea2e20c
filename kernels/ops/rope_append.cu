// From a projection to the attention: rows of queries and keys are normalised and rotated in fp32, queries are stored,
// keys and values go to a paged cache, rounded to fp8 where the cache is fp8. One launch, and every element is read once
// and written once to each output.
//
// A warp has some rows of every token that it takes, queries, keys or values, so that what depends on heads is worked out
// once. A row of queries or keys has a group of lanes, a power of two, and each lane 16 elements of it: eight pairs while
// RoPE lasts, and 16 neighbours behind. Values move in pieces that lie one after another. Where tokens are many, warps take
// them in turn, and ask for slot and position of the next one before they wait for this one's rows and angles; warps are
// as many as registers have room for, which keeps enough bytes on their way. Slots beyond the cache are skipped; positions
// beyond the table are those of its ends.
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

// The tokens that a warp takes: every `stride`-th from `first` on.
struct Tokens {
    i64 first, stride;
};

// --- queries and keys -------------------------------------------------------------------------------

// Where they come from and go to.
struct Rotated {
    const FolioRows &in, &out;        // a null out: nowhere
    const FolioAppendTensor *cached;  // null: queries
    const void *weight;
    u32 weight_dtype, num_heads;
    i64 num_tokens;
};

template <class T>
__device__ __forceinline__ void read_angles(const Params &p, i64 position, Lane &lane) {
    const i64 at = place_of_angles(p, position, VECTOR * lane.index);
    load_shared<T>(lane.angles.cos, static_cast<const typename T::Storage *>(p.cos) + at, VECTOR, true);
    load_shared<T>(lane.angles.sin, static_cast<const typename T::Storage *>(p.sin) + at, VECTOR, true);
}

__device__ __forceinline__ void find_angles(const Params &p, i64 position, Lane &lane) {
    if (!lane.is_rotated) return;
    if (!p.cos) {
        compute_angles(p, position, VECTOR * lane.index, lane.angles);
    } else if (p.cos_sin_dtype == FOLIO_F32) {
        read_angles<f32>(p, position, lane);
    } else {
        read_angles<Source>(p, position, lane);
    }
}

// The rows of a warp, one for each of its groups, of tokens in turn. Groups beyond the last head read its row, and store
// nothing.
__device__ __forceinline__ void move_rotated(const Params &p, const Rotated &of, u32 first_head, const Tokens &tokens) {
    if (tokens.first >= of.num_tokens) return;
    const u32 wanted = first_head + (threadIdx.x % WARP >> p.log2_lanes), head = min(wanted, of.num_heads - 1);
    Lane lane = lane_of(p);
    lane.group = FULL_WARP;  // all groups come here: exchanges among some lanes of a warp have to find out which
    const Source::Storage *in = row_of<Source>(of.in, tokens.first, head);
    Source::Storage *out = of.out.data ? row_of<Source>(of.out, tokens.first, head) : nullptr;
    const i64 in_step = tokens.stride * of.in.stride_token, out_step = tokens.stride * of.out.stride_token;
    Cached::Storage *const cache = Cache::first_row(p.append.k.cache, head);
    i64 position = position_of(p, tokens.first);
    auto row = lane.pieces.fetched<Source>(in, true);
#pragma unroll 1
    for (i64 token = tokens.first;;) {
        const i64 slot = of.cached ? slot_index(p.append, token) : -1;
        find_angles(p, position, lane);
        lane.pieces.take(row);
        token += tokens.stride;
        const bool is_last = token >= of.num_tokens;
        if (!is_last) {
            in += in_step;
            row = lane.pieces.fetched<Source>(in, true);
            position = position_of(p, token);
        }
        compute_row<Source>(p, lane, of.weight, of.weight_dtype, true);
        if (wanted == head) {
            if (out) store_row<Source>(lane.pieces, out, true);
            if (slot >= 0 && slot < p.append.num_slots) {
                const CacheSlot at = place(p.append, slot);
                Cached::Storage *const to = cache + Cache::offset(p.append.k.cache, at.page, at.token);
                const CacheRounding<Cached> rounding(p.append.k, head);
                lane.pieces.each([&](u32 d, const float(&x)[VECTOR], u32) { rounding.vector(x).store(to + d); });
            }
        }
        if (is_last) return;
        out += out_step;
    }
}

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
        for (i64 token = tokens.first; token < of.num_tokens; token += tokens.stride) {
            in = row_of<Source>(of.in, token, head);
            out = of.out.data && wanted == head ? row_of<Source>(of.out, token, head) : nullptr;
            cached = of.cached && wanted == head ? cached_row(slot_index(p.append, token)) : nullptr;
            // Every lane has read the row when the first of them writes.
            if (of.weight) factor = norm_factor(p, squares(), lanes, FULL_WARP);
            rotate(p.rotary_dim > 0 ? position_of(p, token) : 0);
#pragma unroll 1
            for (u32 d = p.rotary_dim + first; d < p.append.k.head_dim; d += lanes) put(d, number(d));
        }
    }

private:
    __device__ __forceinline__ Cached::Storage *cached_row(i64 slot) const {
        if (slot < 0 || slot >= p.append.num_slots) return nullptr;
        const CacheSlot at = place(p.append, slot);
        return Cache::row(p.append.k.cache, at.page, at.token, head);
    }

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
constexpr u32 PIECES = 2;

template <u32 N>
__device__ __forceinline__ void move_values(const FolioAppendParams &p, u32 unit, const Tokens &tokens) {
    typedef AppendPiece<N, Source, Cached> ValuePiece;
    const u32 all = p.num_kv_heads * p.v.pieces.divisor, first = unit * PIECES * WARP + threadIdx.x % WARP;
    i64 next = tokens.first < p.num_tokens ? slot_index(p, tokens.first) : -1;
#pragma unroll 1
    for (i64 token = tokens.first; token < p.num_tokens; token += tokens.stride) {
        const i64 slot = next;
        Elements<N, Source> in[PIECES];
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            const u32 piece = first + i * WARP;
            if (piece < all) in[i] = ValuePiece(p.v, piece).load(p.v, token);
        }
        next = token + tokens.stride < p.num_tokens ? slot_index(p, token + tokens.stride) : -1;
        if (slot < 0 || slot >= p.num_slots) continue;
        const CacheSlot at = place(p, slot);
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            const ValuePiece piece(p.v, min(first + i * WARP, all - 1));
            if (first + i * WARP < all) piece.store(p.v, at, in[i], CacheRounding<Cached>(p.v, piece.head));
        }
    }
}

// --- what a warp has --------------------------------------------------------------------------------

// A warp's unit of a token: of those of queries, then of keys, then of values. src/cuda/ops/rope_append.rs counts them too.
__device__ __forceinline__ void move_unit(const Params &p, u32 unit, const Tokens &tokens) {
    const FolioAppendParams &a = p.append;
    const u32 rows = WARP >> p.log2_lanes;
    const u32 of_queries = (p.num_q_heads + rows - 1) / rows, of_keys = (a.num_kv_heads + rows - 1) / rows;
    if (unit < of_queries + of_keys) {
        const bool are_keys = unit >= of_queries;
        const Rotated of = {are_keys ? a.k.source : p.q,
                            are_keys ? p.key_out : p.q_out,
                            are_keys ? &a.k : nullptr,
                            are_keys ? p.k_weight : p.q_weight,
                            are_keys ? p.k_weight_dtype : p.q_weight_dtype,
                            are_keys ? a.num_kv_heads : p.num_q_heads,
                            are_keys ? a.num_tokens : p.num_q_rows};
        const u32 first_head = (are_keys ? unit - of_queries : unit) * rows;
        if (p.vectors) {
            move_rotated(p, of, first_head, tokens);
        } else {
            LooseRows(p, of, first_head).move(tokens);
        }
    } else if (a.vectors) {
        move_values<VECTOR>(a, unit - of_queries - of_keys, tokens);
    } else {
        move_values<1>(a, unit - of_queries - of_keys, tokens);
    }
}

// CTAs of a multiprocessor, which src/cuda/ops/rope_append.rs launches where tokens are many.
constexpr u32 BLOCKS = 5;

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::BLOCKS)
    folio_rope_append(const __grid_constant__ FolioRopeAppendParams p) {
    using namespace folio;
    allow_dependents();  // what attends to the tokens prepares itself meanwhile
    wait_for_prerequisites();
    const u32 warp = blockIdx.x * WARPS + threadIdx.x / WARP, at_once = divide(gridDim.x * WARPS, p.units_of_token);
    const u32 token = divide(warp, p.units_of_token);
    if (token < at_once) move_unit(p, warp - token * p.units_of_token.divisor, {token, at_once});
}
