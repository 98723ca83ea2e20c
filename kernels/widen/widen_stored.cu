// Keys and values of a batch to dense 16-bit rows, as widen.cu, from caches in other forms than rows of plain elements. Rows
// hold the numbers that these are read as in float32, rounded to their type. Those of NVFP4 and of the x-packed layout, whose
// scales of heads stay out, are exact.
//
// fp16 does not have the range of a float32 scale. So rows that are rounded to it are divided by units, a power of two for
// each head of K and of V, which come back as factors of the head: a first launch finds for each the largest magnitude that the
// scales of the batch's keys, or of the head's channels, let a number have, and the unit brings that to 2^15.
#include "core/logits.cuh"
#include "core/stored_rows.cuh"
#include "core/units.cuh"
#include "params/stored_widen.h"
#include "widen/chunks.cuh"

namespace folio {

typedef FolioStoredWidenParams Params;
static_assert(CHUNK == STORED_ROWS, "a warp brings a chunk");

// --- units ------------------------------------------------------------------------------------------

// The largest magnitude of a code.
__device__ __forceinline__ float most_code(u32 element) {
    switch (element) {
        case FOLIO_I8: return 128.0f;
        case FOLIO_I4: return 8.0f;
        default: return MOST_E4M3;
    }
}

__device__ __forceinline__ const FolioStoredTensor &side_of(const Params &p, u32 of_values) {
    return of_values ? p.cache.v : p.cache.k;
}

__device__ __forceinline__ float *unit_of(const Params &p, u32 of_values, u32 head) {
    return p.widen.units + of_values * p.widen.num_kv_heads.divisor + head;
}

// Takes over the largest magnitude that the warp knows. Positive numbers are ordered as their bits are.
__device__ __forceinline__ void raise_unit(const Params &p, u32 of_values, u32 head, float largest) {
    const float unit = power_of_two_above(warp_max(largest)) * 0x1p-15f;
    if (threadIdx.x % LANES == 0) {
        atomicMax(reinterpret_cast<i32 *>(unit_of(p, of_values, head)), __float_as_int(unit));
    }
}

__device__ __forceinline__ void units_of_tokens(const Params &p) {
    const float most = most_code(p.cache.format.element);
    for_each_chunk(p.widen, [&](const Key &key, u32 head, i64) {
#pragma unroll
        for (u32 of_values = 0; of_values < 2; of_values++) {
            float scale = 0.0f;
            if (key.is_held(p.widen)) {
                scale = *StoredRow(side_of(p, of_values), FOLIO_I8, key.page, key.token, head).scale();
            }
            raise_unit(p, of_values, head, fabsf(scale) * most);
        }
    });
}

__device__ __forceinline__ void units_of_channels(const Params &p) {
    const float most = most_code(p.cache.format.element);
    const u32 lane = threadIdx.x % LANES, warp = blockIdx.x * WARPS + threadIdx.x / LANES;
    const u32 num_heads = p.widen.num_kv_heads.divisor;
#pragma unroll 1
    for (u32 unit = warp; unit < 2 * num_heads; unit += gridDim.x * WARPS) {
        const u32 of_values = unit >= num_heads, head = of_values ? unit - num_heads : unit;
        const FolioStoredTensor &t = side_of(p, of_values);
        const float *const scales = static_cast<const float *>(t.scales) + head * t.scales_head;
        const float *const zeros = t.zero_points ? t.zero_points + head * t.zero_points_head : nullptr;
        float largest = 0.0f;
        for (u32 d = lane; d < t.head_dim; d += LANES) {
            largest = fmaxf(largest, fabsf(scales[d]) * (most + (zeros ? fabsf(zeros[d]) : 0.0f)));
        }
        raise_unit(p, of_values, head, largest);
    }
}

// What the heads' rows are to be multiplied by, when units are known: for each request, where it has scales of its own.
__device__ __forceinline__ void write_factors(const Params &p, u32 of_values) {
    const bool of_requests = p.flags & (of_values ? FOLIO_RUN_V_SCALES_OF_REQUESTS : FOLIO_RUN_K_SCALES_OF_REQUESTS);
    const float *const scales = of_values ? p.v_scales : p.k_scales;
    const i32 stride = of_values ? p.v_scales_stride : p.k_scales_stride;
    float *const factors = of_values ? p.v_factors : p.k_factors;
    const u32 num_heads = p.widen.num_kv_heads.divisor;
    const u32 count = (of_requests ? p.widen.plan.counts[FOLIO_COUNT_REQUESTS] : 1) * num_heads;
    for (u32 i = threadIdx.x; i < count; i += FOLIO_THREADS) {
        const u32 head = i - divide(i, p.widen.num_kv_heads) * num_heads;
        factors[i] = *unit_of(p, of_values, head) * (of_requests ? scales[i] : head_scale(scales, stride, head));
    }
}

// --- rows -------------------------------------------------------------------------------------------

// Where the rows of a chunk go. Those that the cache does not have become zeros.
struct WidenedRows {
    u16 *first;    // the head's, of the chunk's first row
    i64 apart;     // elements from one row to the next
    float factor;  // 1 / unit
    bool is_f16;

    __device__ __forceinline__ void vector(u32 row, u32 d, const float (&x)[VECTOR], bool exists) const {
        float y[VECTOR];
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) y[i] = exists ? x[i] * factor : 0.0f;
        const uint4 out = is_f16 ? packed<f16>(y) : packed<bf16>(y);
        *reinterpret_cast<uint4 *>(first + row * apart + d) = out;
    }
    // Heads have whole vectors.
    __device__ __forceinline__ void elements(u32 row, u32 d, u32, const float (&x)[VECTOR], bool exists) const {
        vector(row, d, x, exists);
    }

    template <class Wanted>
    static __device__ __forceinline__ uint4 packed(const float (&x)[VECTOR]) {
        return make_uint4(Wanted::pack(x[0], x[1]), Wanted::pack(x[2], x[3]), Wanted::pack(x[4], x[5]),
                          Wanted::pack(x[6], x[7]));
    }
};

__device__ __forceinline__ void widen_rows(const Params &p) {
    const u32 num_heads = p.widen.num_kv_heads.divisor;
    for_each_chunk(p.widen, [&](const Key &key, u32 head, i64 first_row) {
        const StoredPlace at = {key.page, key.token, key.is_held(p.widen)};
#pragma unroll 1
        for (u32 of_values = 0; of_values < 2; of_values++) {
            const FolioStoredTensor &t = side_of(p, of_values);
            u16 *const rows = static_cast<u16 *>(of_values ? p.widen.v_rows : p.widen.k_rows);
            const WidenedRows to = {
                rows + (first_row * num_heads + head) * t.head_dim, static_cast<i64>(num_heads) * t.head_dim,
                p.k_factors ? 1.0f / *unit_of(p, of_values, head) : 1.0f, p.widen.row_dtype == FOLIO_F16};
            bring_rows(t, p.cache.format, at, head, t.vectors, to);
        }
    });
}

}  // namespace folio

// Only where rows are divided by units. Grid: any number of CTAs.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_widen_units(const __grid_constant__ FolioStoredWidenParams p) {
    using namespace folio;
    allow_dependents();
    wait_for_prerequisites();
    if (p.cache.format.form == FOLIO_FORM_TOKEN_HEAD_SCALES) {
        units_of_tokens(p);
    } else {
        units_of_channels(p);
    }
}

// Grid: any number of CTAs above one.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 3)
    folio_widen_stored(const __grid_constant__ FolioStoredWidenParams p) {
    using namespace folio;
    allow_dependents();
    wait_for_prerequisites();
    if (p.k_factors && blockIdx.x < 2) write_factors(p, blockIdx.x);
    widen_rows(p);
}
