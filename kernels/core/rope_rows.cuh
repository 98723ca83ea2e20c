// Rows of queries and keys in the operators that normalise, rotate and append: a row has a group of lanes, a power of two,
// and each lane 16 elements of it, eight pairs while RoPE lasts, and 16 neighbours behind. They are computed in fp32.
#pragma once
#include "core/awaited_integer.cuh"
#include "core/rope.cuh"
#include "params/rope_append.h"

namespace folio {

// The part of every row that this lane has.
struct Lane {
    u32 index, count;  // of the group
    u32 group;         // lanes of it in the warp's mask
    bool is_rotated;
    RowPieces pieces;
    PairAngles angles;
};

// The position of a token, with its offset.
class AwaitedPosition {
public:
    __device__ __forceinline__ void ask(const FolioRopeAppendParams &p, i64 token) {
        if (p.positions) position.ask(p.positions, p.position_bytes, token);
        if (p.offsets) offset.ask(p.offsets, p.offset_bytes, token);
    }

    __device__ __forceinline__ i64 value(const FolioRopeAppendParams &p) const {
        u64 sum = p.positions ? position.value(p.position_bytes) : 0;
        if (p.offsets) sum += offset.value(p.offset_bytes);
        return static_cast<i64>(sum);
    }

private:
    AwaitedInteger position, offset;
};

__device__ __forceinline__ i64 position_of(const FolioRopeAppendParams &p, i64 token) {
    AwaitedPosition position;
    position.ask(p, token);
    return position.value(p);
}

// Where the table has the cosines or sines of a position, from pair `first` on; in elements.
__device__ __forceinline__ i64 place_of_angles(const FolioRopeAppendParams &p, i64 position, u32 first) {
    return max(min(position, p.max_position - 1), 0ll) * p.cos_sin_stride + first;
}

// Without a table.
__device__ __forceinline__ void compute_angle(const FolioRopeAppendParams &p, i64 position, u32 pair, float &cos,
                                              float &sin) {
    // Modulo 2^64, which is one turn. Half turns from -1 to 1:
    const u64 turns = static_cast<u64>(position) * p.turns[pair];
    const float halves = static_cast<float>(static_cast<i32>(turns >> 32)) * (1.0f / 2147483648.0f);
    sincospif(halves, &sin, &cos);
}

// Of pairs from `first` on.
__device__ __forceinline__ void compute_angles(const FolioRopeAppendParams &p, i64 position, u32 first,
                                               PairAngles &angles) {
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) {
        compute_angle(p, position, min(first + i, FOLIO_MOST_PAIRS - 1u), angles.cos[i], angles.sin[i]);
    }
}

__device__ __forceinline__ Lane lane_of(const FolioRopeAppendParams &p) {
    const u32 pairs = p.rotary_dim / 2, first = VECTOR * (threadIdx.x & ((1u << p.log2_lanes) - 1));
    const u32 rotated_lanes = (pairs + VECTOR - 1) / VECTOR;
    Lane lane;
    lane.count = 1u << p.log2_lanes;
    lane.index = first / VECTOR;
    const u32 in_warp = threadIdx.x % 32;
    lane.group = (lane.count == 32 ? 0xffffffffu : (1u << lane.count) - 1) << (in_warp & ~(lane.count - 1));
    lane.is_rotated = first < pairs;
    if (lane.is_rotated) {
        lane.pieces = RowPieces::of_pairs(first, pairs, p.is_interleaved);
        return lane;
    }
    const u32 dim = p.append.k.head_dim;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 begin = min(p.rotary_dim + 2 * VECTOR * (lane.index - rotated_lanes) + VECTOR * half, dim);
        lane.pieces.begin[half] = begin;
        lane.pieces.count[half] = min(VECTOR, dim - begin);
    }
    return lane;
}

template <class T>
__device__ __forceinline__ void scale_by(RowPieces &pieces, float factor, const void *weight, bool vectors) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float weights[VECTOR];
        if (pieces.count[half] == 0) continue;
        load_numbers<T>(weights, static_cast<const typename T::Storage *>(weight) + pieces.begin[half],
                        pieces.count[half], vectors);
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) pieces.x[half][i] = pieces.x[half][i] * factor * weights[i];
    }
}

// What RMS norm multiplies by, of the squares that a lane of the group has.
__device__ __forceinline__ float norm_factor(const FolioRopeAppendParams &p, float squares, u32 lanes_of_row,
                                             u32 group) {
    for (u32 lanes = lanes_of_row / 2; lanes > 0; lanes /= 2) squares += __shfl_xor_sync(group, squares, lanes);
    return __frsqrt_rn(squares / static_cast<float>(p.append.k.head_dim) + p.rms_norm_eps);
}

// RMS norm. Lanes without elements have zeros.
template <class Source>
__device__ __forceinline__ void normalise(const FolioRopeAppendParams &p, Lane &lane, const void *weight, u32 dtype,
                                          bool vectors) {
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) {
        squares += lane.pieces.x[0][i] * lane.pieces.x[0][i] + lane.pieces.x[1][i] * lane.pieces.x[1][i];
    }
    const float factor = norm_factor(p, squares, lane.count, lane.group);
    if (dtype == FOLIO_F32) {
        scale_by<f32>(lane.pieces, factor, weight, vectors);
    } else {
        scale_by<Source>(lane.pieces, factor, weight, vectors);
    }
}

// A row that its lanes have taken, normalised and rotated. All of it is read before any of it is written, where the norm
// needs it, and otherwise what a lane writes is what it has read.
template <class Source>
__device__ __forceinline__ void compute_row(const FolioRopeAppendParams &p, Lane &lane, const void *weight, u32 dtype,
                                            bool vectors) {
    if (weight) normalise<Source>(p, lane, weight, dtype, vectors);
    if (lane.is_rotated) lane.pieces.rotate(lane.angles, p.is_interleaved);
}

template <class T>
__device__ __forceinline__ void store_row(const RowPieces &pieces, typename T::Storage *row, bool vectors) {
    pieces.each([&](u32 d, const float(&x)[VECTOR], u32 count) { Piece<T>(x).store(row + d, count, vectors); });
}

}  // namespace folio
