// The decode kernel's view of a K or V tile: where a row's bytes lie in shared memory, and how a warp turns
// them into mma.sync operands. No global memory here.
#pragma once

#include "common/warp_mma.cuh"

namespace folio {

// Rows of kRowBytes as [row / 8][atom][8 rows][atom bytes] with the swizzle of the tensor map: groups of
// eight rows, so that one rank-5 TMA box fills any multiple of eight rows, and ldmatrix has no conflicts.
template <int kRowBytes>
struct RowTile {
    static constexpr int kAtomBytes = kRowBytes % 128 == 0 ? 128 : 64;
    static constexpr int kAtomChunks = kAtomBytes / 16;
    static constexpr int kGroupBytes = 8 * kRowBytes;
    static constexpr int kRowChunks = kRowBytes / 16;
    static_assert(kRowBytes % kAtomBytes == 0);

    // Byte offset of 16-byte chunk `chunk` of row `row` of a group.
    static __device__ __forceinline__ unsigned at(unsigned row, unsigned chunk) {
        const unsigned flip = kAtomBytes == 128 ? row : row >> 1;
        return chunk / kAtomChunks * (8 * kAtomBytes) + row * kAtomBytes + ((chunk % kAtomChunks ^ flip) << 4);
    }

    // From `origin`, the address of chunk 0 or 1 of a row, to chunk 2 * pair or 2 * pair + 1 of it: the swizzle is
    // an exclusive or, and groups are aligned to their atoms.
    static __device__ __forceinline__ unsigned chunk_pair(unsigned origin, int pair) {
        const unsigned chunk = 2 * pair;
        return (origin ^ (chunk % kAtomChunks << 4)) + chunk / kAtomChunks * (8 * kAtomBytes);
    }
};

// An operand of one m16n8k16 step: keys or values are the 16 rows, queries the 8 columns.
struct WideFragment {
    unsigned r[4];
};
struct alignas(8) NarrowFragment {
    unsigned r[2];
};

// The type that products are taken in.
template <class T>
struct MathOf {
    using Type = F16;
};
template <>
struct MathOf<Bf16> {
    using Type = Bf16;
};

// How the bytes of T (the cache) become 16-row operands. k^T q has tokens as rows and query rows as columns,
// v p has value dimensions as rows: eight query rows fill an instruction.
//
// 16-bit caches are the operands as they are. fp8 caches widen to f16, which holds every fp8 value. A 16-byte
// chunk of an fp8 row spans 16 dimensions, one k step of k^T q: a lane gets dimensions 4i .. 4i + 3 of it where the
// instruction has 2i, 2i + 1, 2i + 8, 2i + 9, and the query is loaded in the same order. For v p, ldmatrix transposes
// pairs of dimensions: rows 0 .. 7 become the even and rows 8 .. 15 the odd dimensions of a chunk.
template <class T>
struct Operands {
    static constexpr bool kFp8 = byte_size<T> == 1;
    using Math = typename MathOf<T>::Type;
    // k16 steps, or blocks of 16 value dimensions, in a pair of 16-byte chunks.
    static constexpr int kStepsPerPair = kFp8 ? 2 : 1;

    // The lane's row (token) and chunk for ldmatrix over 16 tokens and a pair of chunks.
    static __device__ __forceinline__ unsigned key_row(unsigned lane) { return lane & 15; }
    static __device__ __forceinline__ unsigned key_chunk(unsigned lane) { return lane >> 4; }
    static __device__ __forceinline__ unsigned value_row(unsigned lane) { return (lane & 7) + (lane >> 4) * 8; }
    static __device__ __forceinline__ unsigned value_chunk(unsigned lane) { return lane >> 3 & 1; }

    // Keys of 16 tokens: k16 step `step` of the chunk pair at `address`.
    static __device__ __forceinline__ void load_keys(WideFragment (&a)[kStepsPerPair], unsigned address) {
        unsigned x[4];
        ldmatrix_x4(x, address);
        if constexpr (kFp8) {
            widen_fp8<T>(x[0], a[0].r[0], a[0].r[2]);
            widen_fp8<T>(x[1], a[0].r[1], a[0].r[3]);
            widen_fp8<T>(x[2], a[1].r[0], a[1].r[2]);
            widen_fp8<T>(x[3], a[1].r[1], a[1].r[3]);
        } else {
            a[0] = {{x[0], x[1], x[2], x[3]}};
        }
    }

    // Values of 16 tokens, transposed: blocks of 16 dimensions of the chunk pair at `address`.
    static __device__ __forceinline__ void load_values(WideFragment (&a)[kStepsPerPair], unsigned address) {
        unsigned x[4];
        ldmatrix_x4_trans(x, address);
        if constexpr (kFp8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                widen_fp8<T>(permute_bytes(x[i], x[2 + i], 0x6420), a[i].r[0], a[i].r[2]);
                widen_fp8<T>(permute_bytes(x[i], x[2 + i], 0x7531), a[i].r[1], a[i].r[3]);
            }
        } else {
            a[0] = {{x[0], x[1], x[2], x[3]}};
        }
    }

    // The two value dimensions, within a block of 16, that lane quad `g` accumulates.
    static __device__ __forceinline__ unsigned first_dim(unsigned g) { return kFp8 ? 2 * g : g; }
    static constexpr unsigned kDimStep = kFp8 ? 1 : 8;
};

}  // namespace folio
