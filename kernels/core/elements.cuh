// Neighbouring elements of a row that one thread moves between global memory and registers: one, or eight as vectors.
// They are read once, so loads bypass L1 and are evicted from L2 first. Tiles in shared memory are tile.cuh's.
#pragma once
#include "core/dtype.cuh"

namespace folio {

__device__ __forceinline__ uint4 load_evict_first(const uint4 *source) {
    u64 policy;
    uint4 v;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(source), "l"(policy));
    return v;
}

// Elements of one vector; rows moved as vectors are aligned to them, or to 16 bytes where they are longer.
constexpr u32 VECTOR = 8;

// N elements of type T; N is 1 or VECTOR.
template <u32 N, class T>
union Elements {
    typename T::Storage x[N];
    uint4 vectors[(N * sizeof(typename T::Storage) + 15) / 16];
    uint2 half;

    __device__ __forceinline__ void load(const typename T::Storage *source) {
        if constexpr (N == 1) {
            x[0] = *source;
        } else if constexpr (N * sizeof(typename T::Storage) == 8) {
            half = *reinterpret_cast<const uint2 *>(source);
        } else {
#pragma unroll
            for (u32 i = 0; i < sizeof(vectors) / 16; i++) {
                vectors[i] = load_evict_first(reinterpret_cast<const uint4 *>(source) + i);
            }
        }
    }

    __device__ __forceinline__ void store(typename T::Storage *target) const {
        if constexpr (N == 1) {
            *target = x[0];
        } else if constexpr (N * sizeof(typename T::Storage) == 8) {
            *reinterpret_cast<uint2 *>(target) = half;
        } else {
#pragma unroll
            for (u32 i = 0; i < sizeof(vectors) / 16; i++) reinterpret_cast<uint4 *>(target)[i] = vectors[i];
        }
    }
};

// Up to eight neighbouring elements of a row.
template <class T>
struct Piece {
    Elements<VECTOR, T> elements;

    Piece() = default;
    __device__ __forceinline__ explicit Piece(const float (&x)[VECTOR]) {
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) set(i, x[i]);
    }

    __device__ __forceinline__ void load(const typename T::Storage *row, u32 count, bool vectors) {
        if (vectors) {
            elements.load(row);
        } else {
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) {
                elements.x[i] = i < count ? row[i] : typename T::Storage(0);
            }
        }
    }

    __device__ __forceinline__ void store(typename T::Storage *row, u32 count, bool vectors) const {
        if (vectors) {
            elements.store(row);
        } else {
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) {
                if (i < count) row[i] = elements.x[i];
            }
        }
    }

    __device__ __forceinline__ float operator[](u32 i) const { return T::load(elements.x[i]); }
    __device__ __forceinline__ void set(u32 i, float x) { elements.x[i] = T::store(x); }
};

// The row of a head.
template <class T>
__device__ __forceinline__ typename T::Storage *row_of(const FolioRows &rows, i64 token, u32 head) {
    return static_cast<typename T::Storage *>(rows.data) + token * rows.stride_token + head * rows.stride_head;
}

// An element of an int32 or int64 tensor.
__device__ __forceinline__ i64 integer(const void *integers, u32 bytes, i64 index) {
    return bytes == 4 ? static_cast<const i32 *>(integers)[index] : static_cast<const i64 *>(integers)[index];
}

}  // namespace folio
