// Division of many numbers by one: as IEEE has it, in six instructions for each number. Scales are not read here.
#pragma once
#include "ptx/types.cuh"

namespace folio {

class RowDivisor {
public:
    __device__ __forceinline__ explicit RowDivisor(float scale) : scale(scale), reciprocal(__frcp_rn(scale)) {}

    // The product with the rounded reciprocal is within two units of the last place; a first correction makes it faithful,
    // and a second one then rounds it correctly (Markstein, IBM J. Res. Dev. 34, 1990). A number whose remainders are not
    // exact is so small that the quotient is stored as zero. Zeros keep their sign; an infinite scale makes zeros of finite
    // numbers, NaN of others.
    __device__ __forceinline__ float divide(float x) const {
        const float first = x * reciprocal;
        const float second = fmaf(fmaf(-first, scale, x), reciprocal, first);
        const float third = fmaf(fmaf(-second, scale, x), reciprocal, second);
        return fabsf(third) > 0.0f ? third : first;
    }

private:
    float scale, reciprocal;
};

}  // namespace folio
