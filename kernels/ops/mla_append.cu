// Writes the records of new tokens to a cache of latent records: as they are, in fp8 by the caller's scale, or as
// fp8_ds_mla records, whose scales are computed here. Where there is a table of angles, rotary elements are rotated
// first, and those of queries too. A CTA takes one token. A token whose slot lies outside the cache is not stored; one
// whose position lies outside the table is left alone altogether.
#include "core/records.cuh"

namespace folio {

typedef FolioMlaAppendParams Params;

__device__ __forceinline__ i64 integer(const void *integers, u32 bytes, i64 index) {
    return bytes == 4 ? static_cast<const i32 *>(integers)[index] : static_cast<const i64 *>(integers)[index];
}

template <class T>
__device__ __forceinline__ typename T::Storage *row_of(const FolioRows &rows, i64 token, u32 head) {
    return static_cast<typename T::Storage *>(rows.data) + token * rows.stride_token + head * rows.stride_head;
}

// Eight quotients in fp8. A function of its own, since divisions and roundings are much code, and many places store.
template <class Fp8>
__device__ __noinline__ uint2 quotients(float x0, float x1, float x2, float x3, float x4, float x5, float x6, float x7,
                                        float divisor) {
    const float x[VECTOR] = {x0, x1, x2, x3, x4, x5, x6, x7};
    Piece<Fp8> out;
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) out.set(i, x[i] / divisor);
    return out.elements.half;
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

// Cosines or sines of up to eight pairs. All heads of a token read them, so they stay in L1.
template <class T>
__device__ __forceinline__ void load_angles(float (&angles)[VECTOR], const typename T::Storage *row, u32 count,
                                            bool vectors) {
    Elements<VECTOR, T> in;
    if (vectors) {
#pragma unroll
        for (u32 i = 0; i < sizeof(in.vectors) / 16; i++) in.vectors[i] = reinterpret_cast<const uint4 *>(row)[i];
    }
#pragma unroll
    for (u32 i = 0; i < VECTOR; i++) {
        if (!vectors) in.x[i] = i < count ? row[i] : row[0];
        angles[i] = T::load(in.x[i]);
    }
}

// Up to eight pairs of a row, from pair `first` on. A thread reads its pairs before it writes them, so that rows may be
// rotated in place.
template <class Source>
struct Pairs {
    Piece<Source> x, y;
    u32 first, count;

    __device__ __forceinline__ Pairs(const Params &p, const typename Source::Storage *row, u32 piece)
        : first(VECTOR * piece), count(min(VECTOR, p.rope_dim / 2 - first)) {
        if (!p.is_interleaved) {
            x.load(row + first, count, p.vectors);
            y.load(row + p.rope_dim / 2 + first, count, p.vectors);
            return;
        }
        Piece<Source> low, high;
        low.load(row + 2 * first, min(VECTOR, 2 * count), p.vectors);
        high.load(row + 2 * first + VECTOR, max(VECTOR, 2 * count) - VECTOR, p.vectors);
#pragma unroll
        for (u32 i = 0; i < VECTOR / 2; i++) {
            x.elements.x[i] = low.elements.x[2 * i];
            y.elements.x[i] = low.elements.x[2 * i + 1];
            x.elements.x[VECTOR / 2 + i] = high.elements.x[2 * i];
            y.elements.x[VECTOR / 2 + i] = high.elements.x[2 * i + 1];
        }
    }

    // Products and sums are rounded one by one, as on the CPU.
    __device__ __forceinline__ void rotate(const float (&cosines)[VECTOR], const float (&sines)[VECTOR]) {
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            const float a = x[i], b = y[i];
            x.set(i, __fsub_rn(__fmul_rn(a, cosines[i]), __fmul_rn(b, sines[i])));
            y.set(i, __fadd_rn(__fmul_rn(b, cosines[i]), __fmul_rn(a, sines[i])));
        }
    }

    // Calls f(first element, piece, count) for both pieces that the pairs are in memory.
    template <class F>
    __device__ __forceinline__ void each_piece(const Params &p, const F &f) const {
        Piece<Source> low = x, high = y;
        u32 begin[2] = {first, p.rope_dim / 2 + first}, counts[2] = {count, count};
        if (p.is_interleaved) {
#pragma unroll
            for (u32 i = 0; i < VECTOR / 2; i++) {
                low.elements.x[2 * i] = x.elements.x[i];
                low.elements.x[2 * i + 1] = y.elements.x[i];
                high.elements.x[2 * i] = x.elements.x[VECTOR / 2 + i];
                high.elements.x[2 * i + 1] = y.elements.x[VECTOR / 2 + i];
            }
            begin[0] = 2 * first, begin[1] = 2 * first + VECTOR;
            counts[0] = min(VECTOR, 2 * count), counts[1] = 2 * count - counts[0];
        }
        f(begin[0], low, counts[0]);
        if (counts[1] > 0) f(begin[1], high, counts[1]);
    }
};

template <class Source>
__device__ __forceinline__ Pairs<Source> rotated(const Params &p, const typename Source::Storage *row, i64 position,
                                                 u32 piece) {
    Pairs<Source> pairs(p, row, piece);
    float cosines[VECTOR], sines[VECTOR];
    const i64 at = position * p.cos_sin_stride + pairs.first;
    if (p.cos_sin_dtype == FOLIO_F32) {
        const float *table = static_cast<const float *>(p.cos_sin) + at;
        load_angles<f32>(cosines, table, pairs.count, p.vectors);
        load_angles<f32>(sines, table + p.rope_dim / 2, pairs.count, p.vectors);
    } else {
        const typename Source::Storage *table = static_cast<const typename Source::Storage *>(p.cos_sin) + at;
        load_angles<Source>(cosines, table, pairs.count, p.vectors);
        load_angles<Source>(sines, table + p.rope_dim / 2, pairs.count, p.vectors);
    }
    pairs.rotate(cosines, sines);
    return pairs;
}

template <class Source>
__device__ __forceinline__ void rotate_queries(const Params &p, i64 token, i64 position) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < p.num_heads * p.rope_pieces.divisor; i += FOLIO_THREADS) {
        const u32 head = divide(i, p.rope_pieces);
        const u32 piece = i - head * p.rope_pieces.divisor;
        typename Source::Storage *out = row_of<Source>(p.q_out, token, head);
        rotated<Source>(p, row_of<Source>(p.q, token, head), position, piece)
            .each_piece(
                p, [&](u32 d, const Piece<Source> &values, u32 count) { values.store(out + d, count, p.vectors); });
    }
}

// The rotary row, rotated.
template <class Source>
__device__ __forceinline__ void store_rotated(const Params &p, i64 token, i64 position, bool stored,
                                              const RecordSlot &slot) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < p.rope_pieces.divisor; i += FOLIO_THREADS) {
        rotated<Source>(p, row_of<Source>(p.rope, token, 0), position, i)
            .each_piece(p, [&](u32 d, const Piece<Source> &values, u32 count) {
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
    const i64 index = integer(p.slots, p.slot_bytes, token);
    const bool stored = index >= 0 && index < p.num_slots;
    const RecordSlot slot(stored ? index : 0, p.page_size);
    if (p.cos_sin) {
        const i64 position = integer(p.positions, p.position_bytes, token);
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
