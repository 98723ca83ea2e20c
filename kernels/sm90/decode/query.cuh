// A query row over a cache of plain elements, as operands. Over other forms it is stored_query.cuh's; where operands are kept
// is for those who multiply.
#pragma once

#include "params/query_type.h"
#include "core/bf16_rows.cuh"
#include "sm90/decode/work.cuh"

namespace folio::decode {

// Queries in fp8 become f16, which has every number of theirs.
template <class Stored>
__device__ __forceinline__ void read_fp8(NarrowFragment (&fragments)[QUERY_STEPS], const u8 *row, u32 dim, u32 lane) {
#pragma unroll
    for (int k = 0; k < QUERY_STEPS; ++k) {
        fragments[k] = {{0, 0}};
        const u32 column = 16 * k + 4 * (lane & 3);
        if (column >= dim) continue;
        widen<Stored>(*reinterpret_cast<const u32 *>(row + column), fragments[k].r[0], fragments[k].r[1]);
    }
}

// Of 16-bit elements.
__device__ __forceinline__ void read_row(NarrowFragment (&fragments)[QUERY_STEPS], const u8 *row, u32 dim, u32 lane) {
#pragma unroll
    for (int k = 0; k < QUERY_STEPS; ++k) {
        fragments[k] = {{0, 0}};
        if constexpr (Op::BITS == 8) {
            const u32 column = 16 * k + 4 * (lane & 3);
            if (column >= dim) continue;
            const uint2 four = *reinterpret_cast<const uint2 *>(row + 2 * column);
            fragments[k] = {{four.x, four.y}};
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 column = 16 * k + 8 * half + 2 * (lane & 3);
                if (column >= dim) continue;
                fragments[k].r[half] = *reinterpret_cast<const u32 *>(row + 2 * column);
            }
        }
    }
}

// From global memory: lane 4g + i reads its part of row g. Columns beyond the problem's are zeros.
__device__ __forceinline__ void read_query(NarrowFragment (&fragments)[QUERY_STEPS],
                                           const FolioPaddedDecodeParams &params, const Item &item, int column_tile,
                                           u32 lane) {
    const FolioRows &q = params.attention.q;
    const PackedRow packed = packed_row(params, item, 8 * (column_tile % ROW_TILES) + lane / 4);
    const i64 token = static_cast<i64>(item.work.q_token) + packed.query;
    const i64 head = (item.kv_head + column_tile / ROW_TILES) * params.group_size + packed.head;
    const i64 element = token * q.stride_token + head * q.stride_head;
    if constexpr (Op::BITS == 8) {
        const u8 *row = static_cast<const u8 *>(q.data) + element;
        const u32 flags = params.attention.flags, dim = params.head_dim_qk;
        if (flags & FOLIO_QUERIES_E4M3) return read_fp8<e4m3>(fragments, row, dim, lane);
        if (flags & FOLIO_QUERIES_E5M2) return read_fp8<e5m2>(fragments, row, dim, lane);
    }
    read_row(fragments, static_cast<const u8 *>(q.data) + 2 * element, params.head_dim_qk, lane);
}

// bf16 becomes f16 without loss of range: the row is divided by a power of two, which is returned, that brings its
// largest element to [1, 2).
__device__ __forceinline__ float narrow_to_f16(NarrowFragment (&fragments)[QUERY_STEPS]) {
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < QUERY_STEPS; ++k) {
        const float2 a = unpack_bf16(fragments[k].r[0]), b = unpack_bf16(fragments[k].r[1]);
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
    }
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
    // Exponents are kept where both 2^e and 2^-e are normal; a row of zeros stays as it is.
    const u32 exponent = min(max(__float_as_uint(largest) >> 23, 1u), 253u);
    const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int k = 0; k < QUERY_STEPS; ++k) {
        const float2 a = unpack_bf16(fragments[k].r[0]), b = unpack_bf16(fragments[k].r[1]);
        fragments[k] = {{f16::pack(a.x * inverse, a.y * inverse), f16::pack(b.x * inverse, b.y * inverse)}};
    }
    return __uint_as_float(exponent << 23);
}

}  // namespace folio::decode
