// Matrix products, by the CBLAS that the build found.
#pragma once

#include <cblas.h>

#include <cstddef>

namespace engine {

// A weight as checkpoints have it: `[out, in]`, compact.
struct Matrix {
    const float *data;
    int out, in;
};

// y[rows, w.out] = x[rows, w.in] · wᵀ + beta · y. Rows of y are `stride` apart, which may be more than w.out: several
// products then fill one wider tensor.
inline void multiply(const float *x, size_t rows, const Matrix &w, float *y, size_t stride, float beta = 0)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(rows), w.out, w.in, 1, x, w.in, w.data, w.in, beta, y,
                static_cast<int>(stride));
}

} // namespace engine
