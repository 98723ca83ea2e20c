// Eight elements of the tokens' type and their numbers, by words of two: element by element the compiler takes twice as many
// instructions.
#pragma once
#include "core/cache_rounding.cuh"

namespace folio {

template <class T>
union Packed {
    Elements<VECTOR, T> elements;
    u32 words[VECTOR * sizeof(typename T::Storage) / 4];

    __device__ __forceinline__ explicit Packed(const Elements<VECTOR, T> &elements) : elements(elements) {}
    __device__ __forceinline__ explicit Packed(const float (&x)[VECTOR]) {
#pragma unroll
        for (u32 i = 0; i < VECTOR; i += 4 / sizeof(typename T::Storage)) {
            if constexpr (sizeof(typename T::Storage) == 4) {
                words[i] = __float_as_uint(x[i]);
            } else {
                words[i / 2] = T::pack(x[i], x[i + 1]);
            }
        }
    }

    __device__ __forceinline__ void unpack(float (&x)[VECTOR]) const {
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            if constexpr (sizeof(typename T::Storage) == 4) {
                x[i] = __uint_as_float(words[i]);
            } else {
                x[i] = T::load(static_cast<u16>(words[i / 2] >> 16 * (i % 2)));
            }
        }
    }
};

// As the cache has them.
template <class T>
__device__ __forceinline__ Elements<VECTOR, T> rounded(const float (&x)[VECTOR], const CacheRounding<T> &rounding) {
    if constexpr (T::IS_FP8) {
        return rounding.vector(x);
    } else {
        return Packed<T>(x).elements;
    }
}

}  // namespace folio
