// From a projection to the attention: rows of queries and keys are normalised and rotated in fp32, queries are stored,
// keys and values go to a paged cache, rounded to fp8 where the cache is fp8. One launch, and every element is read once
// and written once to each output.
//
// A row has a group of lanes, a power of two, and each lane 16 elements of it: eight pairs while RoPE lasts, and 16
// neighbours behind. Groups take the rows of a token in turn: queries, keys, values. CTAs share a token where tokens are
// few; where there are many, a CTA takes tokens in turn. The kernel is bound by the latency of memory: a position is waited
// for, and then the angles there. So a lane asks for the rows and the angles of its next token before it computes those of
// this one, and for slot and position of the one behind; they come to shared memory, since registers for them would leave
// fewer CTAs. Slots beyond the cache are skipped; positions beyond the table are those of its ends.
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

// What the rows of one token have in common.
struct Token {
    i64 index;
    i64 slot;  // negative: not cached
    i64 position;
    bool is_key;  // it has a key and a value
};

__device__ __forceinline__ i64 num_tokens(const Params &p) { return max(p.num_q_rows, p.append.num_tokens); }

__device__ __forceinline__ Token token_of(const Params &p, i64 index) {
    if (index >= num_tokens(p)) return {index, -1, 0, false};
    const bool is_key = index < p.append.num_tokens;
    const i64 slot = is_key ? slot_index(p.append, index) : -1;
    return {index, slot < p.append.num_slots ? slot : -1, position_of(p, index), is_key};
}

typedef RowPieces::Fetched<Source> Fetched;

// Rows that a lane has asked for at a time. With 32 and 8 heads of 128 they are all that it has of a token.
constexpr u32 ROWS_AT_ONCE = sizeof(Source::Storage) == 4 ? 1 : 3;

constexpr u32 WARP = 32, WARPS = FOLIO_THREADS / WARP;

__device__ __forceinline__ void fetch_vector(uint4 &target, const uint4 *source, bool is_there) {
    cp_async<16>(shared_address(&target), source, is_there ? 16 : 0);
}

// Parts of rows and angles that are on their way to shared memory.
struct Staged {
    static constexpr u32 VECTORS = VECTOR * sizeof(Source::Storage) / 16;
    uint4 rows[ROWS_AT_ONCE][2][VECTORS][FOLIO_THREADS];  // each lane's own
    uint4 angles[WARPS][2][2][WARP];  // cosines and sines, fp32 or half as many; for a warp's first group

    // Asks for half a part; for nothing where it is absent.
    __device__ __forceinline__ void fetch(u32 row, u32 half, const Source::Storage *source, bool is_there) {
#pragma unroll
        for (u32 i = 0; i < VECTORS; i++) {
            fetch_vector(rows[row][half][i][threadIdx.x], reinterpret_cast<const uint4 *>(source) + i, is_there);
        }
    }

    __device__ __forceinline__ Fetched take(u32 row) const {
        Fetched out;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 i = 0; i < VECTORS; i++) {
                out.halves[half].elements.vectors[i] = rows[row][half][i][threadIdx.x];
            }
        }
        return out;
    }

    // Cosines are plane 0, sines plane 1.
    __device__ __forceinline__ void fetch_angles(u32 plane, u32 lane, const void *source, u32 vectors) {
        for (u32 i = 0; i < vectors; i++) {
            fetch_vector(angles[threadIdx.x / WARP][plane][i][lane], static_cast<const uint4 *>(source) + i, true);
        }
    }

    template <class T>
    __device__ __forceinline__ void take_angles(u32 plane, u32 lane, float (&out)[VECTOR]) const {
        Elements<VECTOR, T> in;
#pragma unroll
        for (u32 i = 0; i < sizeof(in.vectors) / 16; i++) in.vectors[i] = angles[threadIdx.x / WARP][plane][i][lane];
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) out[i] = T::load(in.x[i]);
    }
};

// Rows of a token: its queries, then its keys, then its values.
__device__ __forceinline__ bool is_query(const Params &p, u32 row) { return row < p.num_q_heads; }
__device__ __forceinline__ bool is_value(const Params &p, u32 row) {
    return row >= p.num_q_heads + p.append.num_kv_heads;
}

// Pieces of a value, which lanes take in turn: a lane has up to two of them at hand, as it has of queries and keys.
typedef AppendPiece<VECTOR, Source, Cached> ValuePiece;

__device__ __forceinline__ bool values_are_fetched(const Params &p, const Lane &lane) {
    return p.append.vectors && p.append.v.pieces.divisor <= 2 * lane.count;
}

template <class F>
__device__ __forceinline__ void each_value_piece(const FolioAppendTensor &v, u32 head, const Lane &lane, const F &f) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 i = lane.index + half * lane.count;
        if (i < v.pieces.divisor) f(half, ValuePiece(v, head * v.pieces.divisor + i));
    }
}

// Whether the table's angles come through shared memory.
__device__ __forceinline__ bool angles_are_fetched(const Params &p) { return p.cos && p.vectors; }

__device__ __forceinline__ void fetch_angles(const Params &p, const Token &token, const Lane &lane, Staged &staged) {
    // One group asks for all of its warp.
    if (!angles_are_fetched(p) || !lane.is_rotated || threadIdx.x % WARP >= lane.count) return;
    const i64 at = place_of_angles(p, token.position, VECTOR * lane.index);
    const u32 bytes = p.cos_sin_dtype == FOLIO_F32 ? 4 : sizeof(Source::Storage);
    staged.fetch_angles(0, lane.index, static_cast<const u8 *>(p.cos) + at * bytes, bytes * VECTOR / 16);
    staged.fetch_angles(1, lane.index, static_cast<const u8 *>(p.sin) + at * bytes, bytes * VECTOR / 16);
}

template <class T>
__device__ __forceinline__ void take_angles(const Params &p, const Token &token, Lane &lane, const Staged &staged) {
    if (angles_are_fetched(p)) {
        staged.take_angles<T>(0, lane.index, lane.angles.cos);
        staged.take_angles<T>(1, lane.index, lane.angles.sin);
        return;
    }
    const u32 first = VECTOR * lane.index, count = min(VECTOR, p.rotary_dim / 2 - first);
    const i64 at = place_of_angles(p, token.position, first);
    load_angles<T>(lane.angles.cos, static_cast<const typename T::Storage *>(p.cos) + at, count, false);
    load_angles<T>(lane.angles.sin, static_cast<const typename T::Storage *>(p.sin) + at, count, false);
}

__device__ __forceinline__ void find_angles(const Params &p, const Token &token, Lane &lane, const Staged &staged) {
    if (!lane.is_rotated) return;
    if (!p.cos) {
        compute_angles(p, token.position, VECTOR * lane.index, lane.angles);
    } else if (p.cos_sin_dtype == FOLIO_F32) {
        take_angles<f32>(p, token, lane, staged);
    } else {
        take_angles<Source>(p, token, lane, staged);
    }
}

// A query's or a key's row.
__device__ __forceinline__ const Source::Storage *rotated_row(const Params &p, const Token &token, u32 row) {
    if (is_query(p, row)) return row_of<Source>(p.q, token.index, row);
    return row_of<Source>(p.append.k.source, token.index, row - p.num_q_heads);
}

// Asks for a row, if it is wanted and moves in vectors.
__device__ __forceinline__ void fetch_row(const Params &p, const Token &token, u32 row, const Lane &lane, u32 at,
                                          Staged &staged) {
    const u32 heads = p.append.num_kv_heads;
    if (row >= p.num_q_heads + 2 * heads) return;
    if (is_value(p, row)) {
        if (!token.is_key || !values_are_fetched(p, lane)) return;
        each_value_piece(p.append.v, row - p.num_q_heads - heads, lane, [&](u32 half, const ValuePiece &piece) {
            staged.fetch(at, half, piece.source(p.append.v, token.index), true);
        });
    } else if (p.vectors && (is_query(p, row) ? token.index < p.num_q_rows : token.is_key)) {
        const Source::Storage *const source = rotated_row(p, token, row);
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            staged.fetch(at, half, source + lane.pieces.begin[half], lane.pieces.count[half] > 0);
        }
    }
}

// What was asked for, or what does not move in vectors.
__device__ __forceinline__ Fetched fetched_row(const Params &p, const Token &token, u32 row, const Lane &lane, u32 at,
                                               const Staged &staged) {
    if (p.vectors) return staged.take(at);
    return lane.pieces.fetched<Source>(rotated_row(p, token, row), false);
}

// `in` gives the row as it came.
template <class In>
__device__ __forceinline__ void query(const Params &p, const Token &token, u32 head, const In &in, Lane &lane) {
    if (token.index >= p.num_q_rows) return;
    compute_row<Source>(p, lane, in(), p.q_weight, p.q_weight_dtype);
    store_row<Source>(lane.pieces, row_of<Source>(p.q_out, token.index, head), p.vectors);
}

template <class In>
__device__ __forceinline__ void key(const Params &p, const Token &token, u32 head, const In &in, Lane &lane) {
    if (!token.is_key || (token.slot < 0 && !p.key_out.data)) return;
    const FolioAppendTensor &k = p.append.k;
    compute_row<Source>(p, lane, in(), p.k_weight, p.k_weight_dtype);
    if (p.key_out.data) store_row<Source>(lane.pieces, row_of<Source>(p.key_out, token.index, head), p.vectors);
    if (token.slot < 0) return;
    if constexpr (Cached::IS_FP8) {
        const float divisor = cache_divisor(k, head);
#pragma unroll
        for (u32 i = 0; i < 2 * VECTOR; i++) lane.pieces.x[i / VECTOR][i % VECTOR] /= divisor;
    }
    const CacheSlot slot = place(p.append, token.slot);
    store_row<Cached>(lane.pieces, CacheRows<Cached>::row(k.cache, slot.page, slot.token, head), p.vectors);
}

template <u32 N>
__device__ __forceinline__ void copy_value(const Params &p, const Token &token, u32 head, const Lane &lane) {
    const FolioAppendTensor &v = p.append.v;
    const CacheSlot slot = place(p.append, token.slot);
    for (u32 i = lane.index; i < v.pieces.divisor; i += lane.count) {
        const AppendPiece<N, Source, Cached> piece(v, head * v.pieces.divisor + i);
        piece.store(v, slot, piece.load(v, token.index));
    }
}

__device__ __forceinline__ void value(const Params &p, const Token &token, u32 head, u32 at, const Staged &staged,
                                      const Lane &lane) {
    if (token.slot < 0) return;
    if (values_are_fetched(p, lane)) {
        const CacheSlot slot = place(p.append, token.slot);
        const Fetched row = staged.take(at);
        each_value_piece(p.append.v, head, lane, [&](u32 half, const ValuePiece &piece) {
            piece.store(p.append.v, slot, row.halves[half].elements);
        });
    } else if (p.append.vectors) {
        copy_value<VECTOR>(p, token, head, lane);
    } else {
        copy_value<1>(p, token, head, lane);
    }
}

// The rows that a CTA's groups take of a token at a time.
struct Unit {
    Token token;
    u32 first;  // row of this lane's group

    __device__ __forceinline__ void fetch(const Params &p, const Lane &lane, u32 step, Staged &staged) const {
#pragma unroll 1
        for (u32 at = 0; at < ROWS_AT_ONCE; at++) fetch_row(p, token, first + at * step, lane, at, staged);
        fetch_angles(p, token, lane, staged);
    }

    __device__ __forceinline__ void compute(const Params &p, Lane &lane, u32 step, const Staged &staged) const {
        const u32 heads = p.append.num_kv_heads, rows = p.num_q_heads + 2 * heads;
        find_angles(p, token, lane, staged);
#pragma unroll 1
        for (u32 at = 0, row = first; at < ROWS_AT_ONCE && row < rows; at++, row += step) {
            const auto in = [&] { return fetched_row(p, token, row, lane, at, staged); };
            if (is_query(p, row)) {
                query(p, token, row, in, lane);
            } else if (!is_value(p, row)) {
                key(p, token, row - p.num_q_heads, in, lane);
            } else {
                value(p, token, row - p.num_q_heads - heads, at, staged, lane);
            }
        }
    }
};

// A block's share of some tokens: `part` of the rows of every `stride`-th token.
__device__ __forceinline__ void append_tokens(const Params &p, i64 first_token, i64 stride, u32 part,
                                              Staged (&staged)[2]) {
    Lane lane = lane_of(p);
    const u32 rows = p.num_q_heads + 2 * p.append.num_kv_heads;
    const u32 groups = FOLIO_THREADS >> p.log2_lanes, step = p.blocks_of_token.divisor * groups;
    // All lanes go the same way: a group without rows of its own takes part.
    const u32 first = part * groups + (threadIdx.x >> p.log2_lanes), base = part * groups;
    Unit unit = {token_of(p, first_token), first};
    Token upcoming = token_of(p, first_token + stride);
    unit.fetch(p, lane, step, staged[0]);
    cp_async_commit();
#pragma unroll 1
    for (u32 n = 0;; n ^= 1) {
        Unit next = {unit.token, unit.first + ROWS_AT_ONCE * step};
        if (next.first - first + base >= rows) {
            next = {upcoming, first};
            upcoming = token_of(p, upcoming.index + stride);
        }
        const bool is_last = next.token.index >= num_tokens(p);
        if (!is_last) next.fetch(p, lane, step, staged[n ^ 1]);
        cp_async_commit();
        cp_async_wait<1>();
        __syncwarp();  // a group asked for the angles of all
        unit.compute(p, lane, step, staged[n]);
        if (is_last) return;
        __syncwarp();  // all have read what is written next
        unit = next;
    }
}

// CTAs of a multiprocessor, which src/cuda/ops/rope_append.rs launches where tokens are many.
constexpr u32 BLOCKS = 5;

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, folio::BLOCKS)
    folio_rope_append(const __grid_constant__ FolioRopeAppendParams p) {
    using namespace folio;
    __shared__ Staged staged[2];
    allow_dependents();  // what attends to the tokens prepares itself meanwhile
    wait_for_prerequisites();
    const u32 token = divide(blockIdx.x, p.blocks_of_token), stride = divide(gridDim.x, p.blocks_of_token);
    append_tokens(p, token, stride, blockIdx.x - token * p.blocks_of_token.divisor, staged);
}
