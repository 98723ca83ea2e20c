// RoPE on eight pairs of a row, which a thread holds in fp32. In memory they are two pieces of eight elements: one of
// either half of the rotated elements, or sixteen neighbours.
#pragma once
#include "core/elements.cuh"

namespace folio {

// Cosines and sines of eight pairs.
struct PairAngles {
    float cos[VECTOR], sin[VECTOR];
};

// Rotates a pair. Products and sums are rounded one by one, as on the CPU.
__device__ __forceinline__ void turn(float &x, float &y, float cos, float sin) {
    const float a = x, b = y;
    x = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
    y = __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
}

// Up to eight cosines, sines or weights. All heads of a token read them, so they stay in L1.
template <class T>
__device__ __forceinline__ void load_numbers(float (&numbers)[VECTOR], const typename T::Storage *row, u32 count,
                                             bool vectors) {
    Elements<VECTOR, T> in;
    if (vectors) {
#pragma unroll
        for (u32 i = 0; i < sizeof(in.vectors) / 16; i++) in.vectors[i] = reinterpret_cast<const uint4 *>(row)[i];
    }
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) {
        if (!vectors) in.x[i] = i < count ? row[i] : row[0];
        numbers[i] = T::load(in.x[i]);
    }
}

// Two pieces of a row, of up to eight elements each.
struct RowPieces {
    u32 begin[2], count[2];
    float x[2][VECTOR];

    // Eight pairs, or as many as there are, from pair `first` on.
    static __device__ __forceinline__ RowPieces of_pairs(u32 first, u32 pairs, bool interleaved) {
        const u32 count = min(VECTOR, pairs - first);
        RowPieces pieces;
        pieces.begin[0] = interleaved ? 2 * first : first;
        pieces.begin[1] = interleaved ? 2 * first + VECTOR : pairs + first;
        pieces.count[0] = interleaved ? min(VECTOR, 2 * count) : count;
        pieces.count[1] = interleaved ? 2 * count - pieces.count[0] : count;
        return pieces;
    }

    template <class T>
    __device__ __forceinline__ void load(const typename T::Storage *row, bool vectors) {
        take(fetched<T>(row, vectors));
    }

    // The two pieces of a row as they lie in memory, to be taken later.
    template <class T>
    struct Fetched {
        Piece<T> halves[2];
    };

    template <class T>
    __device__ __forceinline__ Fetched<T> fetched(const typename T::Storage *row, bool vectors) const {
        Fetched<T> in;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            in.halves[half].load(row + begin[half], count[half], vectors && count[half] > 0);
        }
        return in;
    }

    template <class T>
    __device__ __forceinline__ void take(const Fetched<T> &in) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) x[half][i] = in.halves[half][i];
        }
    }

    // Calls f(first element, values, count) for both pieces.
    template <class F>
    __device__ __forceinline__ void each(const F &f) const {
        if (count[0] > 0) f(begin[0], x[0], count[0]);
        if (count[1] > 0) f(begin[1], x[1], count[1]);
    }

    __device__ __forceinline__ void rotate(const PairAngles &angles, bool interleaved) {
        if (interleaved) {
            rotate_as<true>(angles);
        } else {
            rotate_as<false>(angles);
        }
    }

private:
    // One branch for all pairs.
    template <bool INTERLEAVED>
    __device__ __forceinline__ void rotate_as(const PairAngles &angles) {
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            const u32 at = 2 * i % VECTOR;
            float &a = INTERLEAVED ? x[2 * i / VECTOR][at] : x[0][i];
            float &b = INTERLEAVED ? x[2 * i / VECTOR][at + 1] : x[1][i];
            turn(a, b, angles.cos[i], angles.sin[i]);
        }
    }
};

}  // namespace folio
