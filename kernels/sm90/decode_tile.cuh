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

    // Byte offset of 16-byte chunk `chunk` of row `row`.
    static __device__ __forceinline__ unsigned at(unsigned row, unsigned chunk) {
        const unsigned flip = kAtomBytes == 128 ? row & 7 : (row >> 1) & 3;
        return (row >> 3) * kGroupBytes + chunk / kAtomChunks * (8 * kAtomBytes) + (row & 7) * kAtomBytes +
               ((chunk % kAtomChunks ^ flip) << 4);
    }

    // As at(row, 2 * pair + (lane's own low bit)), from `origin` = base + at(row, low bit): the swizzle is an
    // exclusive or, and `base` is aligned to 8 * kAtomBytes.
    static __device__ __forceinline__ unsigned chunk_pair(unsigned origin, int pair) {
        const unsigned chunk = 2 * pair;
        return (origin ^ (chunk % kAtomChunks << 4)) + chunk / kAtomChunks * (8 * kAtomBytes);
    }
};

// The A operand of one m16n8k16 step.
struct Fragment {
    unsigned r[4];
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

// How the bytes of T (the cache) become operands of an mma in Math.
//
// 16-bit caches are the operands as they are. fp8 caches widen to f16, which holds every fp8 value. A 16-byte
// chunk of an fp8 row spans 16 dimensions, one k step of q k^T: a lane gets dimensions 4i .. 4i + 3 of it
// where the instruction has 2i, 2i + 1, 2i + 8, 2i + 9, and the query fragment is loaded in the same order.
// For p v, ldmatrix transposes pairs of dimensions: even and odd dimensions of a chunk become two
// accumulator columns, so a lane owns dimensions 4i .. 4i + 3 of each chunk in the output too.
template <class T>
struct Operands {
    static constexpr bool kFp8 = byte_size<T> == 1;
    using Math = typename MathOf<T>::Type;

    // Scores of tokens 0 .. 7 and 8 .. 15; `r` holds chunk pair `pair` of their keys, and step k of `q` covers
    // dimensions 16k .. 16k + 15.
    template <class Query>
    static __device__ __forceinline__ void add_scores(float (&low)[4], float (&high)[4], const Query &q, int pair,
                                                      const unsigned (&r)[4]) {
        if constexpr (kFp8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const Fragment a = q.step(2 * pair + i);
                unsigned b0, b1;
                widen_fp8<T>(r[i], b0, b1);
                mma_16816<Math>(low, a.r, b0, b1);
                widen_fp8<T>(r[2 + i], b0, b1);
                mma_16816<Math>(high, a.r, b0, b1);
            }
        } else {
            const Fragment a = q.step(pair);
            mma_16816<Math>(low, a.r, r[0], r[1]);
            mma_16816<Math>(high, a.r, r[2], r[3]);
        }
    }

    // o += p v for chunk pair `pair` of 16 tokens, transposed into `r`.
    template <int kColumns>
    static __device__ __forceinline__ void add_values(float (&o)[kColumns][4], const unsigned (&p)[4], int pair,
                                                      const unsigned (&r)[4]) {
        if constexpr (kFp8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                unsigned b0, b1;
                widen_fp8<T>(permute_bytes(r[2 * i], r[2 * i + 1], 0x6420), b0, b1);
                mma_16816<Math>(o[4 * pair + 2 * i], p, b0, b1);
                widen_fp8<T>(permute_bytes(r[2 * i], r[2 * i + 1], 0x7531), b0, b1);
                mma_16816<Math>(o[4 * pair + 2 * i + 1], p, b0, b1);
            }
        } else {
            mma_16816<Math>(o[2 * pair], p, r[0], r[1]);
            mma_16816<Math>(o[2 * pair + 1], p, r[2], r[3]);
        }
    }
};

}  // namespace folio
