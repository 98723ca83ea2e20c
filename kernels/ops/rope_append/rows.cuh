// Rows of queries and keys that move in vectors: a warp has some of every token that it takes, asks for them ahead, and writes
// them normalised and rotated. What is the same for all tokens is worked out before the first one: instructions, not bytes, are
// what many rows of queries take their time for.
#pragma once
#include "core/append.cuh"
#include "core/rope_rows.cuh"
#include "ops/rope_append/packed.cuh"
#include "ops/rope_append/tokens.cuh"
#include "ops/rope_append/weights.cuh"

namespace folio {

typedef FolioRopeAppendParams Params;

// Where they come from and go to.
struct Rotated {
    const FolioRows &in, &out;        // a null out: nowhere
    const FolioAppendTensor *cached;  // null: queries
    const void *weight;
    u32 weight_dtype, num_heads;
};

// Rows that a group has of a token: what they share, the angles above all, is found once for them.
constexpr u32 ROWS = VECTORS / (2 * OF_PIECE);

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
          slots(p.append, tokens, of.cached),
          positions(p, tokens, p.rotary_dim > 0),
          head(first_head + (threadIdx.x % WARP >> p.log2_lanes)),
          lane(lane_of(p)),
          between_halves(lane.pieces.begin[1] - lane.pieces.begin[0]),
          in(p, of.in, tokens, head, lane),
          out(p, of.out, tokens, head, lane),
          angle_bytes(p.cos_sin_dtype == FOLIO_F32 ? sizeof(float) : sizeof(Source::Storage)),
          angle_vectors(p.cos && p.rotary_dim / 2 * angle_bytes <= ANGLE_BYTES ? p.rotary_dim / 2 * angle_bytes / 16
                                                                               : 0),
          existing(0) {
        weights.ask(of.weight, of.weight_dtype, lane.pieces);
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            const u32 head = this->head + row * (WARP >> p.log2_lanes);
            roundings[row].made = CacheRounding<Cached>(p.append.k, of.cached ? min(head, of.num_heads - 1) : 0);
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                if (head < of.num_heads && lane.pieces.count[half] > 0) existing |= 1u << (2 * row + half);
            }
        }
    }

    __device__ __forceinline__ void fetch(const LaneStage &stage, u32 n) {
#pragma unroll
        for (u32 i = 0; i < VECTORS; i++) {
            const u32 row = i / (2 * OF_PIECE), half = i / OF_PIECE % 2;
            const Source::Storage *const piece = in.first + row * in.to_next_row + half * between_halves;
            stage.fetch(i, reinterpret_cast<const uint4 *>(piece) + i % OF_PIECE, exists(row, half));
        }
        in.move_on();
        if (angle_vectors == 0) return;
        const i64 at = place_of_angles(n) + 16 * (threadIdx.x % WARP);
        if (threadIdx.x % WARP >= angle_vectors) return;
        stage.fetch_angles(0, static_cast<const u8 *>(p.cos) + at);
        stage.fetch_angles(1, static_cast<const u8 *>(p.sin) + at);
    }

    __device__ __forceinline__ void take(const LaneStage &stage, u32 n) {
#pragma unroll
        for (u32 i = 0; i < VECTORS; i++) {
            taken[i / (2 * OF_PIECE)][i / OF_PIECE % 2].vectors[i % OF_PIECE] = stage.take(i);
        }
        find_angles(stage, n);
        if (n == 0 && of.weight) weights.convert(of.weight_dtype);
    }

    __device__ __forceinline__ void write(u32 n) {
        float factors[ROWS];
        if (of.weight) find_factors(factors);
        Cached::Storage *cached = of.cached ? cached_pieces(n) : nullptr;
        Source::Storage *to = out.first;
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            unpack(row, lane.pieces);
            if (of.weight) scale(lane.pieces, factors[row]);
            if (lane.is_rotated) lane.pieces.rotate(lane.angles, p.is_interleaved);
            if (to) {
                store(row, to + row * out.to_next_row,
                      [](const float(&x)[VECTOR]) { return Packed<Source>(x).elements; });
            }
            if (cached) {
                store(row, cached + row * (WARP >> p.log2_lanes) * p.append.k.cache.stride_head,
                      [&](const float(&x)[VECTOR]) { return rounded(x, roundings[row].made); });
            }
        }
        if (to) out.move_on();
    }

private:
    __device__ __forceinline__ bool exists(u32 row, u32 half) const { return existing >> (2 * row + half) & 1; }

    // Where the table has the cosines or sines of a token, in bytes; without a table, its position.
    __device__ __forceinline__ i64 place_of_angles(u32 n) {
        return positions.at(p, tokens, n, [&](i64 position) {
            return p.cos ? angle_bytes * folio::place_of_angles(p, position, 0) : position;
        });
    }

    // Those of a table come with the rows, where a stage has room for them.
    __device__ __forceinline__ void find_angles(const LaneStage &stage, u32 n) {
        const u32 first = VECTOR * lane.index;
        const i64 place = angle_vectors == 0 && p.rotary_dim > 0 ? place_of_angles(n) : 0;
        if (!lane.is_rotated) return;
        const auto fetched = [&](u32 plane, u32 i) { return stage.angles(plane, first * angle_bytes + 16 * i); };
        const auto in_table = [&](u32 plane, u32 i) {
            const u8 *const table = static_cast<const u8 *>(plane == 0 ? p.cos : p.sin);
            return reinterpret_cast<const uint4 *>(table + place + first * angle_bytes)[i];
        };
        if (angle_vectors > 0) {
            read_angles(fetched);
        } else if (p.cos) {
            read_angles(in_table);
        } else {
            compute_angles(p, place, first, lane.angles);
        }
    }

    // vector(plane, i): the lane's i-th vector of cosines (0) or sines (1).
    template <class F>
    __device__ __forceinline__ void read_angles(const F &vector) {
        if (p.cos_sin_dtype == FOLIO_F32) {
            read_angles_as<f32>(vector);
        } else {
            read_angles_as<Source>(vector);
        }
    }

    template <class T, class F>
    __device__ __forceinline__ void read_angles_as(const F &vector) {
#pragma unroll
        for (u32 plane = 0; plane < 2; plane++) {
            Elements<VECTOR, T> elements;
#pragma unroll
            for (u32 i = 0; i < sizeof(elements) / 16; i++) elements.vectors[i] = vector(plane, i);
            Packed<T>(elements).unpack(plane == 0 ? lane.angles.cos : lane.angles.sin);
        }
    }

    __device__ __forceinline__ void unpack(u32 row, RowPieces &pieces) const {
#pragma unroll
        for (u32 half = 0; half < 2; half++) Packed<Source>(taken[row][half]).unpack(pieces.x[half]);
    }

    // Of the RMS norm of every row. Lanes without elements have zeros. All groups exchange at once: exchanges among some lanes
    // of a warp have to find out which.
    __device__ __forceinline__ void find_factors(float (&factors)[ROWS]) {
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) {
            const float(&x)[2][VECTOR] = lane.pieces.x;
            unpack(row, lane.pieces);
            factors[row] = 0.0f;
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) factors[row] += x[0][i] * x[0][i] + x[1][i] * x[1][i];
        }
#pragma unroll 1
        for (u32 lanes = lane.count / 2; lanes > 0; lanes /= 2) {
#pragma unroll
            for (u32 row = 0; row < ROWS; row++) factors[row] += __shfl_xor_sync(FULL_WARP, factors[row], lanes);
        }
#pragma unroll
        for (u32 row = 0; row < ROWS; row++) factors[row] = norm_factor(p, factors[row], 1, FULL_WARP);
    }

    __device__ __forceinline__ void scale(RowPieces &pieces, float factor) const {
#pragma unroll
        for (u32 i = 0; i < 2 * VECTOR; i++) {
            float &x = pieces.x[i / VECTOR][i % VECTOR];
            x = x * factor * weights.at(i / VECTOR, i % VECTOR);
        }
    }

    // Where the cache has the lane's piece of the first row of a token, or null.
    __device__ __forceinline__ Cached::Storage *cached_pieces(u32 n) {
        const FolioCache &cache = p.append.k.cache;
        const i64 place =
            slots.at(p.append, tokens, n, [&](i64 slot) { return place_in_cache(p.append, cache, slot); });
        if (place == NOWHERE) return nullptr;
        return static_cast<Cached::Storage *>(cache.data) + place + head * cache.stride_head + lane.pieces.begin[0];
    }

    // made(x): eight elements as they are stored.
    template <class T, class F>
    __device__ __forceinline__ void store(u32 row, T *first, const F &made) const {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            if (exists(row, half)) made(lane.pieces.x[half]).store(first + half * between_halves);
        }
    }

    const Params &p;
    const Rotated &of;
    const Tokens &tokens;
    OfTokens<AwaitedSlot> slots;
    OfTokens<AwaitedPosition> positions;
    const u32 head;
    Lane lane;
    const u32 between_halves;
    MovingRows<Source> in, out;
    const u32 angle_bytes, angle_vectors;  // of one; that are fetched of a token's cosines
    u32 existing;                          // bits of halves of rows
    Weights weights;
    LaterRounding roundings[ROWS];
    Elements<VECTOR, Source> taken[ROWS][2];  // of one token
};

}  // namespace folio
