// Rows of caches in other forms on their way out as numbers: a warp brings 32 rows of a head, of which each lane knows one.
// What they are stored as is asked once, before (`with_stored_kind`); then the compiler knows it. Which rows these are, and
// what becomes of the numbers, is the caller's. Rows on their way to a matrix unit as codes are generic/stored_tiles.cuh's.
#pragma once
#include "core/stored.cuh"

namespace folio {

constexpr u32 STORED_ROWS = 32;

// A form and its elements.
template <u32 FORM, u32 ELEMENT_>
struct StoredKind {
    static constexpr u32 ELEMENT = ELEMENT_, BITS = element_bits(ELEMENT_);
    static constexpr bool ZERO_POINTS = FORM == FOLIO_FORM_CHANNEL_ZERO_POINTS;
    static constexpr bool BY_CHANNEL = FORM == FOLIO_FORM_CHANNEL_SCALES || ZERO_POINTS;
    static constexpr bool BY_BLOCK = FORM == FOLIO_FORM_NVFP4;
    static constexpr bool BY_TOKEN = FORM == FOLIO_FORM_TOKEN_HEAD_SCALES;
    static constexpr bool BY_HEAD = FORM == FOLIO_FORM_PACKED_KEYS;  // where there are scales
};

template <class Use>
__device__ __forceinline__ void with_stored_kind(const FolioStoredFormat &format, Use use) {
    switch (format.form) {
        case FOLIO_FORM_TOKEN_HEAD_SCALES:
            if (format.element == FOLIO_I8) {
                use(StoredKind<FOLIO_FORM_TOKEN_HEAD_SCALES, FOLIO_I8>());
            } else {
                use(StoredKind<FOLIO_FORM_TOKEN_HEAD_SCALES, FOLIO_E4M3>());
            }
            break;
        case FOLIO_FORM_CHANNEL_SCALES: use(StoredKind<FOLIO_FORM_CHANNEL_SCALES, FOLIO_I8>()); break;
        case FOLIO_FORM_CHANNEL_ZERO_POINTS: use(StoredKind<FOLIO_FORM_CHANNEL_ZERO_POINTS, FOLIO_I4>()); break;
        case FOLIO_FORM_NVFP4: use(StoredKind<FOLIO_FORM_NVFP4, FOLIO_E2M1>()); break;
        default:
            switch (format.element) {
                case FOLIO_F32: use(StoredKind<FOLIO_FORM_PACKED_KEYS, FOLIO_F32>()); break;
                case FOLIO_F16: use(StoredKind<FOLIO_FORM_PACKED_KEYS, FOLIO_F16>()); break;
                case FOLIO_BF16: use(StoredKind<FOLIO_FORM_PACKED_KEYS, FOLIO_BF16>()); break;
                case FOLIO_E4M3: use(StoredKind<FOLIO_FORM_PACKED_KEYS, FOLIO_E4M3>()); break;
                default: use(StoredKind<FOLIO_FORM_PACKED_KEYS, FOLIO_E5M2>()); break;
            }
    }
}

// Where a row is, if it is anywhere.
struct StoredPlace {
    i64 page;
    u32 token;
    bool exists;
};

// The row that a lane knows.
template <class Kind>
struct KnownRow {
    u64 data;    // 0: there is none
    u64 blocks;  // scales of its blocks
    float scale;

    __device__ __forceinline__ KnownRow(const FolioStoredTensor &t, const StoredPlace &at, u32 head)
        : data(0), blocks(0), scale(1.0f) {
        if (!at.exists) return;
        const StoredRow row(t, Kind::ELEMENT, at.page, at.token, head);
        data = reinterpret_cast<u64>(row.data);
        if constexpr (Kind::BY_BLOCK) blocks = reinterpret_cast<u64>(row.block_scale(0));
        if (Kind::BY_TOKEN || (Kind::BY_HEAD && t.scales)) scale = *row.scale();
    }
};

// Scales and zero points of eight channels.
template <class Kind>
struct EightChannels {
    float scales[VECTOR], zeros[VECTOR];

    __device__ __forceinline__ EightChannels(const FolioStoredTensor &t, u32 head, u32 d, bool exist) {
        const float *const of_head = static_cast<const float *>(t.scales) + head * t.scales_head + d;
        const float *const zeros_of_head = t.zero_points + head * t.zero_points_head + d;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            scales[i] = Kind::BY_CHANNEL && exist ? of_head[i] : 1.0f;
            zeros[i] = Kind::ZERO_POINTS && exist ? zeros_of_head[i] : 0.0f;
        }
    }

    // What elements are read as; `scale` is that of what is larger than a channel.
    __device__ __forceinline__ void apply(float (&x)[VECTOR], float scale) const {
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            if constexpr (Kind::ZERO_POINTS) x[i] -= zeros[i];
            x[i] *= Kind::BY_CHANNEL ? scales[i] : scale;
        }
    }
};

// Eight neighbouring elements as they are stored, aligned to their bytes or to 16.
template <u32 BITS>
struct StoredVector {
    static constexpr u32 WORDS = VECTOR * BITS / 32;
    u32 words[WORDS];

    __device__ __forceinline__ void load(u64 address) {
        if constexpr (WORDS == 1) {
            words[0] = *reinterpret_cast<const u32 *>(address);
        } else if constexpr (WORDS == 2) {
            const uint2 v = *reinterpret_cast<const uint2 *>(address);
            words[0] = v.x, words[1] = v.y;
        } else {
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 4) {
                const uint4 v = *reinterpret_cast<const uint4 *>(address + 4 * i);
                words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
            }
        }
    }

    __device__ __forceinline__ u32 operator[](u32 i) const {
        const u32 at = i * BITS;
        return words[at / 32] >> at % 32 & ~0u >> (32 - BITS);
    }
};

// Lanes divide rows into eights, as many rows at a time as they have lanes for. A lane's channels are the same in all rows.
template <class Kind, class Store>
__device__ __forceinline__ void bring_vectors(const FolioStoredTensor &t, const StoredPlace &at, u32 head,
                                              const Store &store) {
    constexpr u32 AT_ONCE = Kind::BITS == 32 ? 2 : 4;
    const KnownRow<Kind> known(t, at, head);
    const u32 lane = threadIdx.x % STORED_ROWS, pieces = t.head_dim / VECTOR;
    const u32 of_row = min(pieces, STORED_ROWS), together = STORED_ROWS / of_row, own = lane / of_row;
#pragma unroll 1
    for (u32 first_piece = 0; first_piece < pieces; first_piece += of_row) {
        const u32 piece = first_piece + lane - own * of_row, d = VECTOR * piece;
        const bool takes_part = own < together && piece < pieces;
        const EightChannels<Kind> channels(t, head, d, takes_part);
        const i64 offset = StoredRow::place(t, d) * Kind::BITS / 8;
#pragma unroll 1
        for (u32 first = 0; first < STORED_ROWS; first += AT_ONCE * together) {
            StoredVector<Kind::BITS> in[AT_ONCE];
            u8 blocks[AT_ONCE];
            bool exists[AT_ONCE];
#pragma unroll
            for (u32 n = 0; n < AT_ONCE; n++) {
                const u32 row = first + n * together + own;
                const u64 data = __shfl_sync(FULL_WARP, known.data, row % STORED_ROWS);
                exists[n] = takes_part && row < STORED_ROWS && data != 0;
                in[n] = {};
                if (exists[n]) in[n].load(data + offset);
                if constexpr (Kind::BY_BLOCK) {
                    const u64 of_row = __shfl_sync(FULL_WARP, known.blocks, row % STORED_ROWS);
                    blocks[n] = exists[n] ? reinterpret_cast<const u8 *>(of_row)[d / NVFP4_BLOCK] : u8(0);
                }
            }
#pragma unroll
            for (u32 n = 0; n < AT_ONCE; n++) {
                const u32 row = first + n * together + own;
                float scale = __shfl_sync(FULL_WARP, known.scale, row % STORED_ROWS);
                if constexpr (Kind::BY_BLOCK) scale = e4m3::load(blocks[n]);
                if (!takes_part || row >= STORED_ROWS) continue;
                float x[VECTOR];
#pragma unroll
                for (u32 i = 0; i < VECTOR; i++) x[i] = element_value(Kind::ELEMENT, in[n][i]);
                channels.apply(x, scale);
                store.vector(row, d, x, exists[n]);
            }
        }
    }
}

// The same for a kind that is known at run time.
template <class Store>
struct BringVectors {
    const FolioStoredTensor &t;
    const StoredPlace &at;
    u32 head;
    const Store &store;

    template <class Kind>
    __device__ __forceinline__ void operator()(Kind) const {
        bring_vectors<Kind>(t, at, head, store);
    }
};

// Rows of which eights do not lie together: a lane reads its own by the element. Where elements lie with those of other
// tokens, neighbouring lanes read neighbours.
template <class Store>
__device__ __forceinline__ void bring_elements(const FolioStoredTensor &t, const FolioStoredFormat &format,
                                               const StoredPlace &at, u32 head, const Store &store) {
#pragma unroll 1
    for (u32 d = 0; d < t.head_dim; d += VECTOR) {
        const u32 count = min(VECTOR, t.head_dim - d);
        float x[VECTOR] = {};
        if (at.exists) {
            read_stored(x, StoredRow(t, format.element, at.page, at.token, head), format.form, head, d, count);
        }
        store.elements(threadIdx.x % STORED_ROWS, d, count, x, at.exists);
    }
}

// Brings the warp's rows of a head. Up to eight elements from the d-th on of the row that lane `row` knows go to
// `store.vector(row, d, x, exists)` or to `store.elements(row, d, count, x, exists)`. Of rows that do not exist x is of no use.
template <class Store>
__device__ __forceinline__ void bring_rows(const FolioStoredTensor &t, const FolioStoredFormat &format,
                                           const StoredPlace &at, u32 head, bool by_vectors, const Store &store) {
    if (by_vectors) {
        with_stored_kind(format, BringVectors<Store>{t, at, head, store});
    } else {
        bring_elements(t, format, at, head, store);
    }
}

}  // namespace folio
