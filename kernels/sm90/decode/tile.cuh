// The decode kernel's view of a K or V tile: where a row's bytes lie in shared memory, and how a warp turns
// them into mma.sync operands. No global memory here.
#pragma once

#include "sm90/decode/block_elements.cuh"
#include "sm90/fp8_pairs.cuh"

namespace folio::decode {

// NUM_ROWS rows of ROW_BYTES as [atom][row / 8][8 rows][atom bytes] with the swizzle of the tensor map: groups of eight
// rows, so that a TMA box fills any multiple of eight rows, and ldmatrix has no conflicts. Atoms lie outermost, so that a
// box may bring one of them or all.
template <int ROW_BYTES, int NUM_ROWS>
struct RowTile {
    static constexpr int ATOM_BYTES = ROW_BYTES % 128 == 0 ? 128 : ROW_BYTES % 64 == 0 ? 64 : 32;
    static constexpr int ATOM_CHUNKS = ATOM_BYTES / 16;
    static constexpr int ATOM_STRIDE = NUM_ROWS * ATOM_BYTES;
    static constexpr int GROUP_BYTES = 8 * ATOM_BYTES;
    static constexpr int ROW_CHUNKS = ROW_BYTES / 16;
    static_assert(ROW_BYTES % ATOM_BYTES == 0 && NUM_ROWS % 8 == 0);

    // Byte offset of 16-byte chunk `chunk` of row `row` of a group.
    static __device__ __forceinline__ u32 at(u32 row, u32 chunk) {
        const u32 flip = row * ATOM_BYTES / 128;
        return chunk / ATOM_CHUNKS * ATOM_STRIDE + row * ATOM_BYTES + ((chunk % ATOM_CHUNKS ^ flip) << 4);
    }

    // From `origin`, the address of chunk 0 or 1 of a row, to chunk 2 * pair or 2 * pair + 1 of it: the swizzle is
    // an exclusive or, and groups are aligned to their atoms.
    static __device__ __forceinline__ u32 chunk_pair(u32 origin, int pair) {
        const u32 chunk = 2 * pair;
        return (origin ^ (chunk % ATOM_CHUNKS << 4)) + chunk / ATOM_CHUNKS * ATOM_STRIDE;
    }
};

// An operand of one m16n8k16 step: keys or values are the 16 rows, queries the 8 columns.
struct WideFragment {
    u32 r[4];
};
struct alignas(8) NarrowFragment {
    u32 r[2];
};

// The type that products are taken in: that of a 16-bit cache, fp16 for narrower elements.
template <class T, u32 BYTES = sizeof(typename T::Storage)>
struct MathOf {
    using Type = T;
};
template <class T>
struct MathOf<T, 1> {
    using Type = f16;
};

template <class T>
constexpr int ELEMENT_BITS = 8 * sizeof(typename T::Storage);
template <>
constexpr int ELEMENT_BITS<i4> = 4;
template <>
constexpr int ELEMENT_BITS<e2m1> = 4;

// Four elements of a byte as two fp16 pairs: exact, every value of theirs is one of fp16.
template <class T>
__device__ __forceinline__ void widen(u32 bytes, u32 &low_pair, u32 &high_pair) {
    widen_fp8<T>(bytes, low_pair, high_pair);
}
template <>
__device__ __forceinline__ void widen<i8>(u32 bytes, u32 &low_pair, u32 &high_pair) {
    widen_bytes(bytes, low_pair, high_pair);
}

// What the four words of elements that ldmatrix hands out are multiplied by, where the elements are such.
template <class T>
struct WordFactors {};
template <>
struct WordFactors<e2m1> {
    u32 of_word[4];
    E2m1Shifts shifts;
};

// Word `i` of them: eight nibbles as four pairs, elements n and n + 4.
__device__ __forceinline__ void widen_word(u32 word, const WordFactors<i4> &, int, u32 (&pairs)[4]) {
    widen_nibbles(word, pairs);
}
__device__ __forceinline__ void widen_word(u32 word, const WordFactors<e2m1> &factors, int i, u32 (&pairs)[4]) {
    widen_e2m1(word, factors.of_word[i], factors.shifts, pairs);
}

// How the bytes of T (the cache) become 16-row operands. k^T q has tokens as rows and query rows as columns,
// v p has value dimensions as rows: eight query rows fill an instruction.
//
// 16-bit caches are the operands as they are. Narrower elements widen to fp16, which holds every value of theirs. A 16-byte
// chunk of bytes spans 16 dimensions, one k step of k^T q: a lane gets dimensions 4i .. 4i + 3 of it where the
// instruction has 2i, 2i + 1, 2i + 8, 2i + 9, and the query is loaded in the same order. For v p, ldmatrix transposes
// pairs of dimensions: rows 0 .. 7 become the even and rows 8 .. 15 the odd dimensions of a chunk.
//
// A chunk of nibbles spans 32 dimensions, two steps: a lane gets 8i .. 8i + 7 of it, in the first step n and n + 4 of
// them for n = 0 and 1, in the second for 2 and 3. For v p, ldmatrix transposes fours of dimensions, which the two blocks
// share: 4g and 4g + 1 of the chunk are rows of the first, 4g + 2 and 4g + 3 of the second.
template <class T>
struct Operands {
    static constexpr int BITS = ELEMENT_BITS<T>;
    using Math = typename MathOf<T>::Type;
    // k16 steps, or blocks of 16 value dimensions, in a pair of 16-byte chunks.
    static constexpr int STEPS_PER_PAIR = 16 / BITS;

    // The lane's row (token) and chunk for ldmatrix over 16 tokens and a pair of chunks.
    static __device__ __forceinline__ u32 key_row(u32 lane) { return lane & 15; }
    static __device__ __forceinline__ u32 key_chunk(u32 lane) { return lane >> 4; }
    static __device__ __forceinline__ u32 value_row(u32 lane) { return (lane & 7) + (lane >> 4) * 8; }
    static __device__ __forceinline__ u32 value_chunk(u32 lane) { return lane >> 3 & 1; }

    // Keys of 16 tokens: k16 step `step` of the chunk pair at `address`. Word i is of chunk i / 2 and tokens from 8 (i % 2) on.
    static __device__ __forceinline__ void load_keys(WideFragment (&a)[STEPS_PER_PAIR], u32 address,
                                                     const WordFactors<T> &factors = {}) {
        u32 x[4];
        ldmatrix_x4(x, address);
        if constexpr (BITS == 4) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 pairs[4];
                widen_word(x[i], factors, i, pairs);
                WideFragment *of_chunk = a + i / 2 * 2;
                of_chunk[0].r[i % 2] = pairs[0], of_chunk[0].r[2 + i % 2] = pairs[1];
                of_chunk[1].r[i % 2] = pairs[2], of_chunk[1].r[2 + i % 2] = pairs[3];
            }
        } else if constexpr (BITS == 8) {
            widen<T>(x[0], a[0].r[0], a[0].r[2]);
            widen<T>(x[1], a[0].r[1], a[0].r[3]);
            widen<T>(x[2], a[1].r[0], a[1].r[2]);
            widen<T>(x[3], a[1].r[1], a[1].r[3]);
        } else {
            a[0] = {{x[0], x[1], x[2], x[3]}};
        }
    }

    // Values of 16 tokens, transposed: blocks of 16 dimensions of the chunk pair at `address`. Word i is of chunk i % 2 and tokens
    // from 8 (i / 2) on.
    static __device__ __forceinline__ void load_values(WideFragment (&a)[STEPS_PER_PAIR], u32 address,
                                                       const WordFactors<T> &factors = {}) {
        u32 x[4];
        ldmatrix_x4_trans(x, address);
        if constexpr (BITS == 4) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 pairs[4];
                widen_word(x[i], factors, i, pairs);
                // Chunk i % 2, tokens from 8 (i / 2) on.
                WideFragment *of_chunk = a + i % 2 * 2;
                const int first = i / 2 * 2;
                of_chunk[0].r[first] = pairs[0], of_chunk[0].r[first + 1] = pairs[1];
                of_chunk[1].r[first] = pairs[2], of_chunk[1].r[first + 1] = pairs[3];
            }
        } else if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                widen<T>(__byte_perm(x[i], x[2 + i], 0x6420), a[i].r[0], a[i].r[2]);
                widen<T>(__byte_perm(x[i], x[2 + i], 0x7531), a[i].r[1], a[i].r[3]);
            }
        } else {
            a[0] = {{x[0], x[1], x[2], x[3]}};
        }
    }

    // Of the two value dimensions that lane quad `g` accumulates of a block: where the block has them, the first behind that,
    // and the way to the second.
    static constexpr __device__ __forceinline__ int block_dim(int block) {
        return BITS == 4 ? block / 2 * 32 + block % 2 * 2 : 16 * block;
    }
    static __device__ __forceinline__ u32 first_dim(u32 g) { return BITS == 4 ? 4 * g : BITS == 8 ? 2 * g : g; }
    static constexpr u32 DIM_STEP = BITS == 16 ? 8 : 1;
};

}  // namespace folio::decode
