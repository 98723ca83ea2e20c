// Rows of caches in other forms than rows of plain elements: where a row and its scales are, up to eight neighbouring
// elements as bits, and what the bits mean. Forms and elements are known at run time only: every branch on them goes the
// same way for a whole launch. Whole rows on their way out are stored_rows.cuh's.
#pragma once
#include "core/elements.cuh"
#include "core/paged.cuh"
#include "params/stored.h"

namespace folio {

// The least scale that is computed for a token and head: vLLM's. And what the largest magnitude is divided by.
constexpr float LEAST_SCALE = 1e-6f, MOST_I8 = 127.0f, MOST_E4M3 = 448.0f, MOST_E2M1 = 6.0f;

// Elements that share a scale in NVFP4.
constexpr u32 NVFP4_BLOCK = 16;

// --- elements ---------------------------------------------------------------------------------------

constexpr __device__ __forceinline__ u32 element_bits(u32 element) {
    switch (element) {
        case FOLIO_F32: return 32;
        case FOLIO_F16:
        case FOLIO_BF16: return 16;
        case FOLIO_I4:
        case FOLIO_E2M1: return 4;
        default: return 8;
    }
}

// Two exponent bits and one of the mantissa, moved to their places in fp32; the power of two corrects the bias, exactly for
// the subnormal 0.5 too.
__device__ __forceinline__ float e2m1_value(u32 bits) {
    return __uint_as_float((bits & 8) << 28 | (bits & 7) << 22) * __uint_as_float((127u + 126u) << 23);
}

__device__ __forceinline__ float element_value(u32 element, u32 bits) {
    switch (element) {
        case FOLIO_F32: return __uint_as_float(bits);
        case FOLIO_F16: return f16::load(static_cast<u16>(bits));
        case FOLIO_BF16: return bf16::load(static_cast<u16>(bits));
        case FOLIO_E4M3: return e4m3::load(static_cast<u8>(bits));
        case FOLIO_E5M2: return e5m2::load(static_cast<u8>(bits));
        case FOLIO_I8: return static_cast<float>(static_cast<signed char>(bits));
        case FOLIO_I4: return static_cast<float>(static_cast<i32>(bits ^ 8) - 8);
        default: return e2m1_value(bits);
    }
}

// The nearest integer within two, of two the even one; 0 for NaN.
__device__ __forceinline__ i32 nearest_integer(float x, float least, float most) {
    return x != x ? 0 : __float2int_rn(fminf(fmaxf(x, least), most));
}

// The number of borders between neighbours that lie below, where the even neighbour has the border itself; 0 for NaN.
__device__ __forceinline__ u32 nearest_e2m1(float x) {
    if (x != x) return 0;
    const float m = fabsf(x);
    const u32 bits = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
    return bits | (__float_as_uint(x) >> 28 & 8);
}

// Rounded to nearest even, and saturated.
__device__ __forceinline__ u32 element_of(u32 element, float x) {
    switch (element) {
        case FOLIO_F32: return __float_as_uint(x);
        case FOLIO_F16: return f16::store(x);
        case FOLIO_BF16: return bf16::store(x);
        case FOLIO_E4M3: return e4m3::store(x);
        case FOLIO_E5M2: return e5m2::store(x);
        case FOLIO_I8: return static_cast<u32>(nearest_integer(x, -MOST_I8, MOST_I8)) & 255;
        case FOLIO_I4: return static_cast<u32>(nearest_integer(x, -8.0f, 7.0f)) & 15;
        default: return nearest_e2m1(x);
    }
}

// Eight elements at once: what they are is asked once.
template <class Use>
__device__ __forceinline__ void with_element(u32 element, Use use) {
    switch (element) {
        case FOLIO_F32: use(FOLIO_F32); break;
        case FOLIO_F16: use(FOLIO_F16); break;
        case FOLIO_BF16: use(FOLIO_BF16); break;
        case FOLIO_E4M3: use(FOLIO_E4M3); break;
        case FOLIO_E5M2: use(FOLIO_E5M2); break;
        case FOLIO_I8: use(FOLIO_I8); break;
        case FOLIO_I4: use(FOLIO_I4); break;
        default: use(FOLIO_E2M1); break;
    }
}

__device__ __forceinline__ void element_values(float (&x)[VECTOR], u32 element, const u32 (&bits)[VECTOR]) {
    with_element(element, [&](u32 known) {
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) x[i] = element_value(known, bits[i]);
    });
}

__device__ __forceinline__ void elements_of(u32 (&bits)[VECTOR], u32 element, const float (&x)[VECTOR]) {
    with_element(element, [&](u32 known) {
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) bits[i] = element_of(known, x[i]);
    });
}

// --- rows -------------------------------------------------------------------------------------------

// The row of a token and head, and the scales that go with it.
struct StoredRow {
    const FolioStoredTensor &t;
    u32 element, bits;
    u8 *data;
    i64 scales;  // index of the first

    __device__ __forceinline__ StoredRow(const FolioStoredTensor &t, u32 element, i64 page, i64 token, u32 head)
        : t(t), element(element), bits(element_bits(element)) {
        const i64 at = page * t.cache.stride_page + token * t.cache.stride_token + head * t.cache.stride_head;
        data = static_cast<u8 *>(t.cache.data) + at * (bits < 8 ? 1 : bits / 8);
        scales = page * t.scales_page + token * t.scales_token + head * t.scales_head;
    }

    // The place of element d, counted in elements; all rows of a tensor have it there.
    static __device__ __forceinline__ i64 place(const FolioStoredTensor &t, u32 d) {
        return (d >> t.log2_part) * t.part_stride + (d & ((1u << t.log2_part) - 1));
    }
    __device__ __forceinline__ i64 place(u32 d) const { return place(t, d); }

    // The bits of element d.
    __device__ __forceinline__ u32 element_at(u32 d) const {
        switch (bits) {
            case 4: return data[d / 2] >> (4 * (d & 1)) & 15;
            case 8: return data[place(d)];
            case 16: return reinterpret_cast<const u16 *>(data)[place(d)];
            default: return reinterpret_cast<const u32 *>(data)[place(d)];
        }
    }

    __device__ __forceinline__ float *scale() const {
        return static_cast<float *>(const_cast<void *>(t.scales)) + scales;
    }
    __device__ __forceinline__ u8 *block_scale(u32 d) const {
        return static_cast<u8 *>(const_cast<void *>(t.scales)) + scales + d / NVFP4_BLOCK;
    }
};

// The bits of up to eight elements of a row, from a multiple of eight on; zeros behind `count`.
struct StoredPiece {
    u32 x[VECTOR];

    __device__ __forceinline__ void load(const StoredRow &row, u32 d, u32 count) {
        switch (row.bits) {
            case 4: load_pairs(row, d, count); break;
            case 8: load_as<u8>(row, d, count); break;
            case 16: load_as<u16>(row, d, count); break;
            default: load_as<u32>(row, d, count); break;
        }
    }

    __device__ __forceinline__ void store(const StoredRow &row, u32 d, u32 count) const {
        switch (row.bits) {
            case 4: store_pairs(row, d, count); break;
            case 8: store_as<u8>(row, d, count); break;
            case 16: store_as<u16>(row, d, count); break;
            default: store_as<u32>(row, d, count); break;
        }
    }

private:
    template <class Unsigned>
    struct Bits {
        typedef Unsigned Storage;
    };

    template <class Unsigned>
    __device__ __forceinline__ void load_as(const StoredRow &row, u32 d, u32 count) {
        const Unsigned *from = reinterpret_cast<const Unsigned *>(row.data);
        if (row.t.vectors) {
            Elements<VECTOR, Bits<Unsigned>> in;
            in.load(from + row.place(d));
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) x[i] = in.x[i];
            return;
        }
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) x[i] = i < count ? from[row.place(d + i)] : 0;
    }

    template <class Unsigned>
    __device__ __forceinline__ void store_as(const StoredRow &row, u32 d, u32 count) const {
        Unsigned *to = reinterpret_cast<Unsigned *>(row.data);
        if (row.t.vectors) {
            Elements<VECTOR, Bits<Unsigned>> out;
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) out.x[i] = static_cast<Unsigned>(x[i]);
            out.store(to + row.place(d));
            return;
        }
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            if (i < count) to[row.place(d + i)] = static_cast<Unsigned>(x[i]);
        }
    }

    // Pairs lie one after the other, and rows have whole pairs.
    __device__ __forceinline__ void load_pairs(const StoredRow &row, u32 d, u32 count) {
        u32 word = 0;
        if (row.t.vectors) {
            word = *reinterpret_cast<const u32 *>(row.data + d / 2);
        } else {
#pragma unroll
            for (u32 i = 0; i < VECTOR; i += 2) {
                if (i < count) word |= static_cast<u32>(row.data[(d + i) / 2]) << (4 * i);
            }
        }
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) x[i] = word >> (4 * i) & 15;
    }

    __device__ __forceinline__ void store_pairs(const StoredRow &row, u32 d, u32 count) const {
        u32 word = 0;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) word |= x[i] << (4 * i);
        if (row.t.vectors) {
            *reinterpret_cast<u32 *>(row.data + d / 2) = word;
            return;
        }
#pragma unroll
        for (u32 i = 0; i < VECTOR; i += 2) {
            if (i < count) row.data[(d + i) / 2] = static_cast<u8>(word >> (4 * i));
        }
    }
};

// What a row is read as: up to eight elements times their scales, but for those of the tensor.
__device__ __forceinline__ void read_stored(float (&x)[VECTOR], const StoredRow &row, u32 form, u32 head, u32 d,
                                            u32 count) {
    StoredPiece piece;
    piece.load(row, d, count);
    element_values(x, row.element, piece.x);
    if (form == FOLIO_FORM_CHANNEL_SCALES || form == FOLIO_FORM_CHANNEL_ZERO_POINTS) {
        const float *scales = row.scale() + d, *zeros = row.t.zero_points + head * row.t.zero_points_head + d;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            if (i >= count) continue;
            if (form == FOLIO_FORM_CHANNEL_ZERO_POINTS) x[i] -= zeros[i];
            x[i] *= scales[i];
        }
        return;
    }
    float scale = 1.0f;
    if (form == FOLIO_FORM_TOKEN_HEAD_SCALES || (form == FOLIO_FORM_PACKED_KEYS && row.t.scales)) scale = *row.scale();
    if (form == FOLIO_FORM_NVFP4) scale = e4m3::load(*row.block_scale(d));
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) x[i] *= scale;
}

}  // namespace folio
