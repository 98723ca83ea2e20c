// Rows of numbers that go to a cache in another form than rows of plain elements, and the scales that the form has beside
// it. A group of lanes, a power of two, shares a row: eight elements of a lane at a time.
//
// A row is divided by the scale of the tensor, and what is computed from it is computed after that. Quotients are IEEE's, so
// that every byte is the one that the host writes.
#pragma once
#include "core/row_divisor.cuh"
#include "core/stored.cuh"

namespace folio {

// The lanes that share a row. All groups of a warp append together, those without a row too: exchanges among some lanes of a
// warp take ten instructions to find out which.
struct Group {
    u32 lane, count;

    __device__ __forceinline__ explicit Group(u32 log2_lanes)
        : lane(threadIdx.x & ((1u << log2_lanes) - 1)), count(1u << log2_lanes) {}

    // fmaxf leaves NaN out.
    static __device__ __forceinline__ float largest_of(float x, u32 lanes) {
        for (u32 distance = lanes / 2; distance > 0; distance /= 2) {
            x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
        }
        return x;
    }
};

// A row of numbers in memory.
struct NumberRow {
    const void *data;
    u32 dtype;     // FolioDtype: fp32, fp16 or bf16
    bool vectors;  // in global memory, 16-byte aligned, and as long as a multiple of 8 elements

    static __device__ __forceinline__ NumberRow of(const FolioRows &rows, i64 token, u32 head, u32 dtype,
                                                   bool vectors) {
        const i64 at = token * rows.stride_token + head * rows.stride_head;
        return {static_cast<const u8 *>(rows.data) + at * (dtype == FOLIO_F32 ? 4 : 2), dtype, vectors};
    }
};

// What a lane has of a row at a time, divided by the scale of the tensor; zeros behind the row.
struct Numbers {
    float x[VECTOR];

    // From element d on of a row of `dim`.
    __device__ __forceinline__ void load(const NumberRow &row, u32 d, u32 dim) {
        switch (row.dtype) {
            case FOLIO_F32: load_as<f32>(row, d, dim); break;
            case FOLIO_F16: load_as<f16>(row, d, dim); break;
            default: load_as<bf16>(row, d, dim); break;
        }
    }

    template <class Source>
    __device__ __forceinline__ void load_as(const NumberRow &row, u32 d, u32 dim) {
        Piece<Source> piece;
        const auto *const from = static_cast<const typename Source::Storage *>(row.data) + d;
        if (d < dim) piece.load(from, min(VECTOR, dim - d), row.vectors);
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) x[i] = d + i < dim ? piece[i] : 0.0f;
    }

    __device__ __forceinline__ void divide_by(float divisor) {
        if (divisor == 1.0f) return;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) x[i] /= divisor;
    }

    __device__ __forceinline__ float largest() const {
        float most = 0.0f;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) most = fmaxf(most, fabsf(x[i]));
        return most;
    }
};

// Divides by what is a lane's own of the scales, and computes those of blocks.
__device__ __forceinline__ void quantise(Numbers &numbers, const StoredRow &row, u32 form, u32 head, u32 d, u32 count) {
    if (form == FOLIO_FORM_NVFP4) {
        // A block's two lanes are neighbours, and either both have elements or neither.
        const float largest = Group::largest_of(numbers.largest(), NVFP4_BLOCK / VECTOR);
        const u8 scale = e4m3::store(largest / MOST_E2M1);
        if (count > 0 && d % NVFP4_BLOCK == 0) *row.block_scale(d) = scale;
        const float divisor = e4m3::load(scale);
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) numbers.x[i] = divisor == 0.0f ? 0.0f : numbers.x[i] / divisor;
    } else if (form != FOLIO_FORM_PACKED_KEYS && form != FOLIO_FORM_TOKEN_HEAD_SCALES) {
        const float *scales = row.scale() + d, *zeros = row.t.zero_points + head * row.t.zero_points_head + d;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            if (i >= count) continue;
            numbers.x[i] /= scales[i];
            if (form == FOLIO_FORM_CHANNEL_ZERO_POINTS) numbers.x[i] += zeros[i];
        }
    }
}

// The slot of a page that a token goes to, for each KV head.
struct StoredSlot {
    i64 page;
    u32 token;
};

__device__ __forceinline__ StoredSlot stored_slot(i64 index, const FolioDivisor &page_size) {
    const bool is_short = index < 1ll << 31;
    const i64 page = is_short ? divide(static_cast<u32>(index), page_size) : index / page_size.divisor;
    return {page, static_cast<u32>(index - page * page_size.divisor)};
}

// Writes the row of a head, if the group has one. All lanes of a warp call this together.
__device__ __forceinline__ void append_row(const FolioStoredTensor &t, const FolioStoredFormat &format,
                                           const StoredSlot &slot, u32 head, const Group &group, const NumberRow &from,
                                           bool is_there) {
    const u32 form = format.form;
    const u32 dim = is_there ? t.head_dim : 0, step = VECTOR * group.count;
    const u32 longest = __reduce_max_sync(FULL_WARP, dim);
    const StoredRow row(t, format.element, slot.page, slot.token, head);
    const bool is_head_scaled = form == FOLIO_FORM_PACKED_KEYS && t.scales && is_there;
    const float divisor = is_head_scaled ? t.scale * *row.scale() : t.scale;
    Numbers numbers;
    RowDivisor row_scale(1.0f);
    if (form == FOLIO_FORM_TOKEN_HEAD_SCALES) {
        float largest = 0.0f;
#pragma unroll 1
        for (u32 first = 0; first < longest; first += step) {
            numbers.load(from, first + VECTOR * group.lane, dim);
            numbers.divide_by(divisor);
            largest = fmaxf(largest, numbers.largest());
        }
        largest = Group::largest_of(largest, group.count);
        const float scale = fmaxf(largest / (row.element == FOLIO_I8 ? MOST_I8 : MOST_E4M3), LEAST_SCALE);
        if (group.lane == 0 && is_there) *row.scale() = scale;
        row_scale = RowDivisor(scale);
    }
#pragma unroll 1
    for (u32 first = 0; first < longest; first += step) {
        const u32 d = first + VECTOR * group.lane, count = d < dim ? min(VECTOR, dim - d) : 0;
        // A row that the groups have at once was read for its scale.
        if (form != FOLIO_FORM_TOKEN_HEAD_SCALES || longest > step) {
            numbers.load(from, d, dim);
            numbers.divide_by(divisor);
        }
        quantise(numbers, row, form, head, d, count);
        if (form == FOLIO_FORM_TOKEN_HEAD_SCALES) {
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) numbers.x[i] = row_scale.divide(numbers.x[i]);
        }
        StoredPiece piece;
        elements_of(piece.x, row.element, numbers.x);
        if (count > 0) piece.store(row, d, count);
    }
}

}  // namespace folio
