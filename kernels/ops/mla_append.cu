// Writes the records of new tokens to a cache of latent records: as they are, in fp8 by the caller's scale, or as
// fp8_ds_mla records, whose scales are computed here. Where there is a table of angles, rotary elements are rotated
// first, and those of queries too. A CTA takes one token. A token whose slot lies outside the cache is not stored; one
// whose position lies outside the table is left alone altogether.
#include "core/awaited_integer.cuh"
#include "core/cache_rounding.cuh"
#include "core/records.cuh"
#include "core/rope.cuh"

namespace folio {

typedef FolioMlaAppendParams Params;

// A function of its own, since divisions and roundings are much code, and many places store.
template <class Fp8>
__device__ __noinline__ uint2 quotients(float x0, float x1, float x2, float x3, float x4, float x5, float x6, float x7,
                                        float divisor) {
    const float x[VECTOR] = {x0, x1, x2, x3, x4, x5, x6, x7};
    return divided<Fp8>(x, RowDivisor(divisor)).half;
}

template <class Fp8, class Source>
__device__ __forceinline__ void store_fp8(const Piece<Source> &x, u8 *to, u32 count, bool vectors, float divisor) {
    Piece<Fp8> out;
    out.elements.half = quotients<Fp8>(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], divisor);
    out.store(to, count, vectors);
}

// One part of the record: d is the first element of the piece.
template <class Source>
__device__ __forceinline__ void store_piece(const Params &p, const FolioCache &part, u32 dtype, const RecordSlot &slot,
                                            u32 d, const Piece<Source> &piece, u32 count) {
    if (dtype == p.dtype) {
        piece.store(record_row<Source>(part, slot) + d, count, p.vectors);
    } else if (dtype == FOLIO_E4M3) {
        store_fp8<e4m3>(piece, record_row<e4m3>(part, slot) + d, count, p.vectors, p.k_scale);
    } else if (dtype == FOLIO_E5M2) {
        store_fp8<e5m2>(piece, record_row<e5m2>(part, slot) + d, count, p.vectors, p.k_scale);
    } else {  // the rotary part of fp8_ds_mla
        Piece<bf16> out;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) out.set(i, piece[i]);
        out.store(record_row<bf16>(part, slot) + d, count, p.vectors);
    }
}

// A piece of an fp8_ds_mla record. The pieces that share a scale are those of half a warp, all of whose lanes are here.
// fmaxf leaves NaN out.
template <class Source>
__device__ __forceinline__ void store_scaled(const Params &p, const RecordSlot &slot, u32 d,
                                             const Piece<Source> &piece) {
    float largest = 0.0f;
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) largest = fmaxf(largest, fabsf(piece[i]));
#pragma unroll
    for (u32 lanes = PIECES_OF_BLOCK / 2; lanes > 0; lanes /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    const float scale = fmaxf(largest / 448.0f, __uint_as_float(0x00800000u));
    if (d % SCALE_BLOCK == 0) record_row<f32>(p.cache.scales, slot)[d / SCALE_BLOCK] = scale;
    store_fp8<e4m3>(piece, record_row<e4m3>(p.cache.latent, slot) + d, VECTOR, p.vectors, scale);
}

template <class Source>
__device__ __forceinline__ void store_latent(const Params &p, i64 token, const RecordSlot &slot) {
    const typename Source::Storage *row = row_of<Source>(p.latent, token, 0);
#pragma unroll 1
    for (u32 d = VECTOR * threadIdx.x; d < p.rank; d += VECTOR * FOLIO_THREADS) {
        const u32 count = min(VECTOR, p.rank - d);
        Piece<Source> piece;
        piece.load(row + d, count, p.vectors);
        if (p.cache.scales.data) {
            store_scaled(p, slot, d, piece);
        } else {
            store_piece(p, p.cache.latent, p.cache.latent_dtype, slot, d, piece, count);
        }
    }
}

// Up to eight pairs of a row, rotated, from pair 8 · piece on. A thread reads its pairs before it writes them, so that rows
// may be rotated in place.
template <class Source>
__device__ __forceinline__ RowPieces rotated(const Params &p, const typename Source::Storage *row, i64 position,
                                             u32 piece) {
    const u32 first = VECTOR * piece, pairs = p.rope_dim / 2, count = min(VECTOR, pairs - first);
    RowPieces pieces = RowPieces::of_pairs(first, pairs, p.is_interleaved);
    pieces.load<Source>(row, p.vectors);
    PairAngles angles;
    const i64 at = position * p.cos_sin_stride + first;
    if (p.cos_sin_dtype == FOLIO_F32) {
        const float *table = static_cast<const float *>(p.cos_sin) + at;
        load_numbers<f32>(angles.cos, table, count, p.vectors);
        load_numbers<f32>(angles.sin, table + pairs, count, p.vectors);
    } else {
        const typename Source::Storage *table = static_cast<const typename Source::Storage *>(p.cos_sin) + at;
        load_numbers<Source>(angles.cos, table, count, p.vectors);
        load_numbers<Source>(angles.sin, table + pairs, count, p.vectors);
    }
    pieces.rotate(angles, p.is_interleaved);
    return pieces;
}

template <class Source>
__device__ __forceinline__ void rotate_queries(const Params &p, i64 token, i64 position) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < p.num_heads * p.rope_pieces.divisor; i += FOLIO_THREADS) {
        const u32 head = divide(i, p.rope_pieces);
        const u32 piece = i - head * p.rope_pieces.divisor;
        typename Source::Storage *out = row_of<Source>(p.q_out, token, head);
        rotated<Source>(p, row_of<Source>(p.q, token, head), position, piece)
            .each([&](u32 d, const float(&values)[VECTOR], u32 count) {
                Piece<Source>(values).store(out + d, count, p.vectors);
            });
    }
}

// The rotary row, rotated.
template <class Source>
__device__ __forceinline__ void store_rotated(const Params &p, i64 token, i64 position, bool stored,
                                              const RecordSlot &slot) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < p.rope_pieces.divisor; i += FOLIO_THREADS) {
        rotated<Source>(p, row_of<Source>(p.rope, token, 0), position, i)
            .each([&](u32 d, const float(&x)[VECTOR], u32 count) {
                const Piece<Source> values(x);
                if (p.rope_out.data) values.store(row_of<Source>(p.rope_out, token, 0) + d, count, p.vectors);
                if (stored) store_piece(p, p.cache.rope, p.cache.rope_dtype, slot, d, values, count);
            });
    }
}

// The rotary row as it is.
template <class Source>
__device__ __forceinline__ void store_rope(const Params &p, i64 token, const RecordSlot &slot) {
    const typename Source::Storage *row = row_of<Source>(p.rope, token, 0);
#pragma unroll 1
    for (u32 d = VECTOR * threadIdx.x; d < p.rope_dim; d += VECTOR * FOLIO_THREADS) {
        const u32 count = min(VECTOR, p.rope_dim - d);
        Piece<Source> piece;
        piece.load(row + d, count, p.vectors);
        store_piece(p, p.cache.rope, p.cache.rope_dtype, slot, d, piece, count);
    }
}

template <class Source>
__device__ __forceinline__ void append_token(const Params &p, i64 token) {
    // The two are on their way together.
    AwaitedInteger number, awaited_position;
    number.ask(p.slots, p.slot_bytes, token);
    if (p.cos_sin) awaited_position.ask(p.positions, p.position_bytes, token);
    const i64 index = number.value(p.slot_bytes);
    const bool stored = index >= 0 && index < p.num_slots;
    const RecordSlot slot(stored ? index : 0, p.page_size);
    if (p.cos_sin) {
        const i64 position = awaited_position.value(p.position_bytes);
        if (position < 0 || position >= p.max_position) return;
        if (p.q.data) rotate_queries<Source>(p, token, position);
        store_rotated<Source>(p, token, position, stored, slot);
    } else if (stored && p.rope.data) {
        store_rope<Source>(p, token, slot);
    }
    if (stored) store_latent<Source>(p, token, slot);
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_mla_append(const __grid_constant__ FolioMlaAppendParams p) {
    using namespace folio;
    wait_for_prerequisites();
    switch (p.dtype) {
        case FOLIO_F32: append_token<f32>(p, blockIdx.x); break;
        case FOLIO_F16: append_token<f16>(p, blockIdx.x); break;
        default: append_token<bf16>(p, blockIdx.x); break;
    }
}
