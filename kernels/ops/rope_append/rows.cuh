// Rows of queries and keys that move in vectors: a warp has some of every token that it takes, asks for them ahead, and writes
// them normalised and rotated.
#pragma once
#include "core/append.cuh"
#include "core/rope_rows.cuh"
#include "ops/rope_append/tokens.cuh"

namespace folio {

typedef FolioRopeAppendParams Params;
typedef CacheRows<Cached> Cache;

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

    __device__ __forceinline__ void take(const Stage &stage, u32 n) {
#pragma unroll
        for (u32 i = 0; i < VECTORS; i++) {
            taken[i / (2 * OF_PIECE)].halves[i / OF_PIECE % 2].elements.vectors[i % OF_PIECE] = stage.take(i);
        }
        find_angles(stage, n);
    }

    __device__ __forceinline__ void write(u32 n) {
        Cached::Storage *cached = of.cached ? cached_token(p, slots.at(p.append, tokens, n)) : nullptr;
        if (cached) cached += head * p.append.k.cache.stride_head + lane.pieces.begin[0];
        Source::Storage *to = out.first;
        // Not unrolled: the norm is long, and its weights would take registers for every row.
#pragma unroll 1
        for (u32 row = 0; row < ROWS; row++) {
            lane.pieces.take(taken[0]);
#pragma unroll
            for (u32 next = 1; next < ROWS; next++) taken[next - 1] = taken[next];
            write_row(row, to, cached);
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
    __device__ __forceinline__ i64 position_of(u32 n) { return p.rotary_dim > 0 ? positions.at(p, tokens, n) : 0; }

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
        load_numbers<T>(lane.angles.cos, static_cast<const typename T::Storage *>(cos) + at, VECTOR, true);
        load_numbers<T>(lane.angles.sin, static_cast<const typename T::Storage *>(sin) + at, VECTOR, true);
    }

    __device__ __forceinline__ void write_row(u32 row, Source::Storage *to, Cached::Storage *cached) {
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
    OfTokens<AwaitedSlot> slots;
    OfTokens<AwaitedPosition> positions;
    const u32 head;
    Lane lane;
    const u32 between_halves;
    MovingRows<Source> in, out;
    RowPieces::Fetched<Source> taken[ROWS];  // of one token
};

}  // namespace folio
