// The weights that a lane multiplies the elements of normalised rows by, in registers: they are the same for all tokens.
#pragma once
#include "core/rope_rows.cuh"
#include "ops/rope_append/packed.cuh"
#include "ops/rope_append/tokens.cuh"

namespace folio {

// They are asked for before the first rows and converted behind them: to convert is to wait.
class Weights {
public:
    __device__ __forceinline__ void ask(const void *row, u32 dtype, const RowPieces &pieces) {
        if (!row) return;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            if (pieces.count[half] == 0) continue;
            if (dtype == FOLIO_F32) {
                ask_as<f32>(half, static_cast<const float *>(row) + pieces.begin[half]);
            } else {
                ask_as<Source>(half, static_cast<const Source::Storage *>(row) + pieces.begin[half]);
            }
        }
    }

    __device__ __forceinline__ void convert(u32 dtype) {
        if (dtype != FOLIO_F32) convert_from<Source>();
    }

    __device__ __forceinline__ float at(u32 half, u32 i) const { return numbers[half].x[i]; }

private:
    template <class T>
    __device__ __forceinline__ void ask_as(u32 half, const typename T::Storage *from) {
#pragma unroll
        for (u32 i = 0; i < sizeof(Elements<VECTOR, T>) / 16; i++) {
            numbers[half].vectors[i] = reinterpret_cast<const uint4 *>(from)[i];
        }
    }

    template <class T>
    __device__ __forceinline__ void convert_from() {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            Elements<VECTOR, T> elements;
#pragma unroll
            for (u32 i = 0; i < sizeof(elements) / 16; i++) elements.vectors[i] = numbers[half].vectors[i];
            Packed<T>(elements).unpack(numbers[half].x);
        }
    }

    Elements<VECTOR, f32> numbers[2];  // not yet converted: the first vectors are what memory has
};

}  // namespace folio
