// Keys and values of a cache in another form, on their way to tiles of fp16 or bf16 in shared memory. Tiles hold the
// numbers of the elements, in NVFP4 times the scales of their blocks: 16 bits hold all of these exactly. What else is scaled
// stays out of the tiles (attention_stored.cu).
//
// Where rows are aligned, their bytes are copied a tile ahead by cp.async, and widened from shared memory. Other rows, and
// vLLM's first layout, are read element by element when their tile is due: slow, and right for every stride.
#pragma once
#include "core/stored.cuh"
#include "core/tile.cuh"
#include "core/widen.cuh"
#include "ptx/shared.cuh"

namespace folio {

__device__ __forceinline__ u32 ld_shared_byte(u32 address) {
    u32 x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

// What of keys (or of values) one warp brings: ROWS rows of a tile of KEYS, from its row `first` on. Lane l has row
// l % ROWS, and every 32 / ROWS-th piece of it.
template <class T, int KEYS, int ROWS, int DIM>
struct StoredTile {
    static_assert(32 % ROWS == 0 && DIM % 128 == 0, "a row for each lane; rows of nibbles are rows of a tile");
    static constexpr u32 LANES_OF_ROW = 32 / ROWS;
    // That are widened together; wider rows leave no registers for it.
    static constexpr int UNITS_AT_ONCE = DIM == 128 ? 2 : 1;
    // 16-bit elements, and the bytes of rows that are copied ahead. Nibbles leave half of them for scales.
    static constexpr int TILE_BYTES = KEYS * 2 * DIM, RAW_BYTES = KEYS * DIM;
    static constexpr int SCALES_OFFSET = RAW_BYTES / 2, SCALES_OF_ROW = DIM / NVFP4_BLOCK;

    const FolioStoredTensor &t;
    FolioStoredFormat format;
    u32 first, head;

    __device__ __forceinline__ u32 row_of_tile() const { return first + threadIdx.x % ROWS; }
    __device__ __forceinline__ bool is_nibbles() const {
        return format.element == FOLIO_I4 || format.element == FOLIO_E2M1;
    }

    // Starts the copies of a tile's rows; `holds`: this lane's row is in the cache.
    __device__ __forceinline__ void copy(u32 raw, const KeySlot &slot, bool holds) const {
        const StoredRow row(t, format.element, slot.page, slot.token, head);
        const void *data = holds ? row.data : nullptr;
        if (!is_nibbles()) {
            copy_rows<ROWS, DIM>(raw, first, data, t.head_dim, 16);
            return;
        }
        copy_rows<ROWS, DIM / 2>(raw, first, data, t.head_dim / 2, 16);
        if (format.form != FOLIO_FORM_NVFP4 || !holds) return;
        const u32 to = raw + SCALES_OFFSET + row_of_tile() * SCALES_OF_ROW;
        for (u32 at = threadIdx.x % 32 / ROWS * 4; at < t.head_dim / NVFP4_BLOCK; at += LANES_OF_ROW * 4) {
            cp_async<4>(to + at, row.block_scale(0) + at, 4);
        }
    }

    // Widens what `copy` brought. Rows that the cache does not have become zeros.
    __device__ __forceinline__ void widen(u32 tile, u32 raw, bool holds) const {
        switch (holds ? format.element : static_cast<u32>(FOLIO_F32)) {
            case FOLIO_I8: widen_as<FOLIO_I8>(tile, raw); break;
            case FOLIO_E4M3: widen_as<FOLIO_E4M3>(tile, raw); break;
            case FOLIO_I4: widen_as<FOLIO_I4>(tile, raw); break;
            case FOLIO_E2M1: widen_as<FOLIO_E2M1>(tile, raw); break;
            default: widen_as<FOLIO_F32>(tile, raw); break;
        }
    }

    // Reads rows where they are.
    __device__ __forceinline__ void read(u32 tile, const KeySlot &slot, bool holds) const {
        const StoredRow from(t, format.element, slot.page, slot.token, head);
        const u32 dim = holds ? t.head_dim : 0;
        if (from.bits == 16) {
            read_halves(tile, from, dim);
        } else {
            read_elements(tile, from, dim);
        }
    }

private:
    // FOLIO_F32: there is nothing to widen, and zeros are written.
    template <u32 ELEMENT>
    __device__ __forceinline__ void widen_as(u32 tile, u32 raw) const {
        constexpr bool NIBBLES = ELEMENT == FOLIO_I4 || ELEMENT == FOLIO_E2M1;
#pragma unroll UNITS_AT_ONCE
        for (u32 unit = threadIdx.x % 32 / ROWS; unit < DIM / 16; unit += LANES_OF_ROW) {
            u32 x[8] = {}, bytes[4] = {}, factor = 0;
            if constexpr (NIBBLES) {
                const uint2 v = ld_shared_v2(raw + TileRow<DIM / 2>::offset(row_of_tile(), unit / 2) + unit % 2 * 8);
                bytes[0] = v.x, bytes[1] = v.y;
            } else if constexpr (ELEMENT != FOLIO_F32) {
                const uint4 v = ld_shared_v4(raw + TileRow<DIM>::offset(row_of_tile(), unit));
                bytes[0] = v.x, bytes[1] = v.y, bytes[2] = v.z, bytes[3] = v.w;
            }
            if constexpr (ELEMENT == FOLIO_E2M1) {
                const u32 at = raw + SCALES_OFFSET + row_of_tile() * SCALES_OF_ROW + unit;
                const float scale = e4m3::load(static_cast<u8>(ld_shared_byte(at)));
                factor = 16 * unit < t.head_dim ? T::pack(scale, scale) : 0;
            }
            if constexpr (ELEMENT != FOLIO_F32) widen_16<T, ELEMENT>(x, bytes, factor);
            store(tile, unit, x);
        }
    }

    // Elements of the type of the tile, eight at a time.
    __device__ __forceinline__ void read_halves(u32 tile, const StoredRow &from, u32 dim) const {
        const u16 *row = reinterpret_cast<const u16 *>(from.data);
#pragma unroll 1
        for (u32 d = threadIdx.x % 32 / ROWS * VECTOR; d < DIM; d += LANES_OF_ROW * VECTOR) {
            u32 x[4] = {};
            if (d < dim) {
#pragma unroll
                for (u32 i = 0; i < 4; i++) x[i] = row[from.place(d + 2 * i)] | row[from.place(d + 2 * i + 1)] << 16;
            }
            st_shared_v4(tile + TileRow<2 * DIM>::offset(row_of_tile(), d / VECTOR), x);
        }
    }

    // Any elements, two at a time.
    __device__ __forceinline__ void read_elements(u32 tile, const StoredRow &from, u32 dim) const {
#pragma unroll 1
        for (u32 d = threadIdx.x % 32 / ROWS * 2; d < DIM; d += LANES_OF_ROW * 2) {
            float x[2] = {};
            const bool by_block = format.form == FOLIO_FORM_NVFP4;
            const float scale = by_block && d < dim ? e4m3::load(*from.block_scale(d)) : 1.0f;
#pragma unroll 1
            for (u32 i = 0; i < 2 && d < dim; i++) {
                const float y = element_value(format.element, from.element_at(d + i)) * scale;
                x[0] = x[1], x[1] = y;
            }
            st_shared_u32(tile + TileRow<2 * DIM>::offset(row_of_tile(), d / VECTOR) + d % VECTOR * 2,
                          T::pack(x[0], x[1]));
        }
    }

    static __device__ __forceinline__ void store_chunk(u32 address, const u32 (&x)[8], int from) {
        const u32 chunk[4] = {x[from], x[from + 1], x[from + 2], x[from + 3]};
        st_shared_v4(address, chunk);
    }

    __device__ __forceinline__ void store(u32 tile, u32 unit, const u32 (&x)[8]) const {
        store_chunk(tile + TileRow<2 * DIM>::offset(row_of_tile(), 2 * unit), x, 0);
        store_chunk(tile + TileRow<2 * DIM>::offset(row_of_tile(), 2 * unit + 1), x, 4);
    }
};

}  // namespace folio
