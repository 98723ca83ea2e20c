// A warp's ring of tiles of keys and values for the decode kernel over caches in other forms: rows as they are stored, on
// their way from global to shared memory by cp.async. Four neighbouring lanes share a row, so that a lane has every eighth
// key and looks up its page by itself.
//
//   Elements of a byte or fewer: rows, two stages. Scales of tokens and of NVFP4's blocks are beside them.
//   Packed keys, of 16 bits: keys as rows, of which every 16 bytes are in a place of their own; values as they lie in the
//     cache, the tile's tokens of one column side by side. One stage.
//
// Rows that are not aligned are read by loads that the lane waits for: slow, and right for every stride. Elements of packed
// keys in 8 bits become 16-bit numbers in this way.
#pragma once
#include "core/stored.cuh"
#include "core/tile.cuh"
#include "generic/work.cuh"

namespace folio {

__device__ __forceinline__ void st_shared_half(u32 address, u16 x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

__device__ __forceinline__ void st_shared_byte(u32 address, u32 x) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ u32 ld_shared(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

// Where packed keys lie in a tile: as in a page, so that lines of 128 bytes stay together on their way. Eight tokens of one
// chunk of 16 bytes are in different banks.
template <int KEYS>
struct PackedKeys {
    static __device__ __forceinline__ u32 offset(u32 token, u32 chunk) { return (chunk * KEYS + token) * 16; }
};

// The same of packed values: all columns of 16 tokens, then those of the next. A chunk is a block of eight tokens. The two
// of a column change places in every other four columns, so that eight columns of one block are in different banks.
template <int DIM>
struct PackedValues {
    static constexpr u32 COLUMN_BYTES = 32, GROUP_BYTES = DIM * COLUMN_BYTES;

    static __device__ __forceinline__ u32 offset(u32 column, u32 block) {
        return block / 2 * GROUP_BYTES + column * COLUMN_BYTES + ((block ^ column >> 2) & 1) * 16;
    }
};

// Stages of keys, then of values, then a factor for each key and value of each. Nibbles leave half of a stage, in which the
// scales of their blocks are.
template <int KEYS, int DIM>
struct StoredRing {
    static constexpr int STAGE_BYTES = KEYS * DIM, SCALES_OFFSET = STAGE_BYTES / 2, SCALES_OF_ROW = DIM / NVFP4_BLOCK;
    static constexpr int FACTOR_BYTES = KEYS * 4, BYTES = 4 * (STAGE_BYTES + FACTOR_BYTES);
    u32 ring;

    // `stage` counts bytes: 0 or STAGE_BYTES.
    __device__ __forceinline__ u32 keys(u32 stage) const { return ring + stage; }
    __device__ __forceinline__ u32 values(u32 stage) const { return ring + 2 * STAGE_BYTES + stage; }
    __device__ __forceinline__ u32 key_factors(u32 stage) const {
        return ring + 4 * STAGE_BYTES + stage / STAGE_BYTES * FACTOR_BYTES;
    }
    __device__ __forceinline__ u32 value_factors(u32 stage) const { return key_factors(stage) + 2 * FACTOR_BYTES; }
};

// Brings a warp's tiles. Slots of the next tile's keys are looked up one tile ahead. T: the type of queries.
template <class T, int KEYS, int DIM>
struct StoredLoader {
    static constexpr int PASSES = KEYS / 8;
    typedef StoredRing<KEYS, DIM> Ring;

    const FolioStoredAttentionParams &p;
    PageTable table;
    KeyRange keys, looked_up;
    u32 head;
    bool packed, nibbles, by_copy;  // by cp.async
    i32 key;                        // of the lane's first row
    KeySlot slots[PASSES];

    __device__ __forceinline__ StoredLoader(const FolioStoredAttentionParams &p, const Work &work, KeyRange keys,
                                            i32 tile)
        : p(p),
          table(p.generic.attention, *work.item, p.generic.page_size),
          keys(keys),
          looked_up(keys),
          head(work.kv_head),
          packed(p.cache.format.form == FOLIO_FORM_PACKED_KEYS),
          nibbles(element_bits(p.cache.format.element) == 4),
          key(tile * KEYS + static_cast<i32>(threadIdx.x % 32 / 4)) {
        by_copy = p.copied_ahead && (row_bytes(p.cache.k) | row_bytes(p.cache.v)) % 16 == 0;
        // Eight tokens of packed values come together, and a page has a multiple of eight.
        if (packed && by_copy) looked_up = {keys.begin / 8 * 8, (keys.end + 7) / 8 * 8};
        if (keys.begin < keys.end) look_up();
    }

    __device__ __forceinline__ void copy_keys(const Ring &ring, u32 stage) const {
        copy<false>(p.cache.k, ring.keys(stage), ring.key_factors(stage));
    }

    __device__ __forceinline__ void copy_values(const Ring &ring, u32 stage) const {
        copy<true>(p.cache.v, ring.values(stage), ring.value_factors(stage));
    }

    // To the tile that is `tiles` further. There are keys.
    __device__ __forceinline__ void advance(i32 tiles) {
        key += tiles * KEYS;
        look_up();
    }

private:
    static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }

    __device__ __forceinline__ u32 row_bytes(const FolioStoredTensor &t) const {
        return packed ? 2 * t.head_dim : nibbles ? t.head_dim / 2 : t.head_dim;
    }

    // Of a key that is not visible, the nearest that is: no lane waits for another's branch.
    __device__ __forceinline__ void look_up() {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            slots[pass] = table[min(max(key + 8 * pass, looked_up.begin), looked_up.end - 1)];
        }
    }

    // A page that the cache lacks may be any number: no address is made of it.
    __device__ __forceinline__ u32 page(const KeySlot &slot) const {
        return min(static_cast<u32>(slot.page), max(p.generic.attention.num_pages, 1u) - 1);
    }

    // Keys outside the visible range or the cache become zeros, values too: 0 * NaN must not happen in P * V.
    __device__ __forceinline__ bool is_there(int pass) const {
        return keys.holds(key + 8 * pass) && table.holds(slots[pass]);
    }

    template <bool VALUES>
    __device__ __forceinline__ void copy(const FolioStoredTensor &t, u32 tile, u32 factors) const {
        if (!by_copy) {
            read<VALUES>(t, tile);
        } else if (!packed) {
            if (nibbles) {
                copy_rows_ahead<DIM / 2>(t, tile);
            } else {
                copy_rows_ahead<DIM>(t, tile);
            }
        } else if constexpr (VALUES) {
            copy_packed_values(t, tile);
        } else {
            copy_packed_keys(t, tile);
        }
        if (p.cache.format.form == FOLIO_FORM_TOKEN_HEAD_SCALES) copy_factor(t, factors);
        if (p.cache.format.form == FOLIO_FORM_NVFP4) copy_block_scales(t, tile + Ring::SCALES_OFFSET);
    }

    // Rows of BYTES.
    template <int BYTES>
    __device__ __forceinline__ void copy_rows_ahead(const FolioStoredTensor &t, u32 tile) const {
        typedef LaneRows<KEYS, BYTES, 4, false> Rows;
        const Rows rows(0);
        const u8 *const first =
            static_cast<const u8 *>(t.cache.data) + head * t.cache.stride_head + 16 * Rows::column();
        const i32 columns = static_cast<i32>(row_bytes(t) / 16 - Rows::column());
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const u8 *const row =
                first + page(slots[pass]) * t.cache.stride_page + slots[pass].token * t.cache.stride_token;
            rows.copy(tile, pass, row, is_there(pass) ? columns : 0);
        }
    }

    // Few runs have packed keys: what follows from it is not computed before the loop, in registers that all would lack.
    static __device__ __forceinline__ u32 packed_lane() { return kept(threadIdx.x % 32); }

    // Eight neighbouring lanes have the same 16 bytes of a block of eight tokens, which are a line of a page.
    __device__ __forceinline__ void copy_packed_keys(const FolioStoredTensor &t, u32 tile) const {
        const u32 lane = packed_lane(), token = lane % 8, chunk = lane / 8, own = lane / 4;
        const i32 chunks = static_cast<i32>(t.head_dim / 8 - chunk);
        const u16 *const first =
            static_cast<const u16 *>(t.cache.data) + head * t.cache.stride_head + chunk * t.part_stride;
        const u32 to = tile + PackedKeys<KEYS>::offset(token, chunk);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const i32 its_key = key - static_cast<i32>(own) + static_cast<i32>(token) + 8 * pass;
            const i32 existing = keys.holds(its_key) && table.holds(slots[pass]) ? chunks : 0;
            const u16 *const row = first + page(slots[pass]) * t.cache.stride_page +
                                   (slots[pass].token - own + token) * t.cache.stride_token;
#pragma unroll
            for (int i = 0; i < DIM / 32; i++) {
                cp_async_or_zeros(to + PackedKeys<KEYS>::offset(8 * pass, 4 * i), row + 4 * i * t.part_stride,
                                  4 * i < existing);
            }
        }
    }

    // Eight neighbouring lanes have blocks that are neighbours in a page, of as many columns as make up 128 bytes.
    // `clear_hidden` clears those of their tokens that are hidden.
    __device__ __forceinline__ void copy_packed_values(const FolioStoredTensor &t, u32 tile) const {
        constexpr u32 AT_ONCE = 32 / PASSES;  // columns
        const u32 lane = packed_lane();
        const u32 blocks_of_page = p.generic.page_size.divisor / 8;
        const u32 log2_blocks = blocks_of_page % 2 != 0 ? 0 : PASSES == 2 || blocks_of_page % 4 != 0 ? 1 : 2;
        const u32 group = lane / 8, groups = PASSES >> log2_blocks, log2_columns = 3 - log2_blocks;
        const u32 block = (lane & ((1u << log2_blocks) - 1)) + ((group % groups) << log2_blocks);
        const u32 column = (lane % 8 >> log2_blocks) + (group / groups << log2_columns);
        const KeySlot slot = slot_of_block(block);
        const u32 in_block = lane / 4;
        const i32 first_key = key - static_cast<i32>(in_block) + 8 * static_cast<i32>(block);
        // Where no key is visible, no slot was looked up.
        const bool is_seen = max(first_key, keys.begin) < min(first_key + 8, keys.end);
        const bool exists = is_seen && table.holds(slot);
        const i32 columns = exists ? static_cast<i32>(t.head_dim - column) : 0;
        const u16 *const from = static_cast<const u16 *>(t.cache.data) + head * t.cache.stride_head +
                                page(slot) * t.cache.stride_page + (slot.token - in_block) + column * t.part_stride;
        const u32 to = tile + PackedValues<DIM>::offset(column, block);
#pragma unroll
        for (u32 i = 0; i < DIM / AT_ONCE; i++) {
            const i32 before = static_cast<i32>(AT_ONCE * i);
            cp_async_or_zeros(to + PackedValues<DIM>::COLUMN_BYTES * AT_ONCE * i, from + before * t.part_stride,
                              before < columns);
        }
    }

    // Lanes that share a row have a scale of one block of eight rows each.
    __device__ __forceinline__ u32 block() const { return lane() % PASSES; }

    // Of the lane's row in a block. Numbers are chosen and not addresses, so that slots stay in registers.
    __device__ __forceinline__ KeySlot slot_of_block(u32 block) const {
        u32 page = slots[0].page, token = slots[0].token;
#pragma unroll
        for (int pass = 1; pass < PASSES; pass++) {
            const u32 its_page = kept(static_cast<u32>(slots[pass].page)), its_token = kept(slots[pass].token);
            page = block == pass ? its_page : page;
            token = block == pass ? its_token : token;
        }
        return {static_cast<i32>(page), token};
    }

    // Of the lane's row in its block.
    __device__ __forceinline__ bool has_scale(const KeySlot &slot) const {
        return keys.holds(key + 8 * static_cast<i32>(block())) && table.holds(slot);
    }

    __device__ __forceinline__ i64 place_of_scale(const FolioStoredTensor &t, const KeySlot &slot) const {
        return page(slot) * t.scales_page + slot.token * t.scales_token + head * t.scales_head;
    }

    __device__ __forceinline__ void copy_factor(const FolioStoredTensor &t, u32 factors) const {
        const KeySlot slot = slot_of_block(block());
        const float *const scale = static_cast<const float *>(t.scales) + place_of_scale(t, slot);
        cp_async<4>(factors + (lane() / 4 + 8 * block()) * 4, scale, has_scale(slot) ? 4 : 0);
    }

    // What is left where there is none multiplies zeros, and is finite.
    __device__ __forceinline__ void copy_block_scales(const FolioStoredTensor &t, u32 scales) const {
        const KeySlot slot = slot_of_block(block());
        if (!has_scale(slot)) return;
        const u8 *const from = static_cast<const u8 *>(t.scales) + place_of_scale(t, slot);
        const u32 to = scales + (lane() / 4 + 8 * block()) * Ring::SCALES_OF_ROW, count = t.head_dim / NVFP4_BLOCK;
        if (by_copy) {
#pragma unroll
            for (u32 at = 0; at < Ring::SCALES_OF_ROW; at += 4) {
                if (at < count) cp_async<4>(to + at, from + at, 4);
            }
        } else {
#pragma unroll 1
            for (u32 at = 0; at < count; at++) st_shared_byte(to + at, from[at]);
        }
    }

    // Reads a tile where it is, a row for each lane.
    template <bool VALUES>
    __device__ __forceinline__ void read(const FolioStoredTensor &t, u32 tile) const {
        const u8 *const known = LaneRows<KEYS, DIM, 4, false>::of_lane([&](int pass) -> const u8 * {
            const KeySlot &slot = slots[pass];
            return is_there(pass) ? StoredRow(t, p.cache.format.element, slot.page, slot.token, head).data : nullptr;
        });
        const u8 *const row = row_address(known, lane() % KEYS);
        if (packed) {
            read_numbers<VALUES>(t, tile, row);
        } else {
            read_bytes(tile, row, static_cast<i32>(row_bytes(t)));
        }
    }

    __device__ __forceinline__ void read_bytes(u32 tile, const u8 *row, i32 bytes) const {
        const u32 token = lane() % KEYS, chunks = nibbles ? DIM / 32 : DIM / 16;
#pragma unroll 1
        for (u32 chunk = lane() / KEYS; chunk < chunks; chunk += 32 / KEYS) {
            const u32 to = nibbles ? TileRow<DIM / 2>::offset(token, chunk) : TileRow<DIM>::offset(token, chunk);
            const i32 existing = row ? bytes - static_cast<i32>(16 * chunk) : 0;
            copy_chunk_bytewise(tile + to, existing, [=](i32 i) { return row[16 * chunk + i]; });
        }
    }

    // Elements at any places, as 16-bit numbers.
    template <bool VALUES>
    __device__ __forceinline__ void read_numbers(const FolioStoredTensor &t, u32 tile, const u8 *row) const {
        const u32 token = lane() % KEYS;
#pragma unroll 1
        for (u32 d = lane() / KEYS * VECTOR; d < DIM; d += 32 / KEYS * VECTOR) {
            u16 bits[VECTOR] = {};
            if (row && d < t.head_dim) read_eight(bits, row, StoredRow::place(t, d), VALUES ? t.part_stride : 1);
#pragma unroll
            for (u32 i = 0; i < VECTOR; i++) {
                const u32 to = VALUES ? PackedValues<DIM>::offset(d + i, token / 8) + token % 8 * 2
                                      : PackedKeys<KEYS>::offset(token, d / VECTOR) + i * 2;
                st_shared_half(tile + to, bits[i]);
            }
        }
    }

    __device__ __forceinline__ void read_eight(u16 (&bits)[VECTOR], const u8 *row, i64 first, i64 step) const {
        const u32 element = p.cache.format.element;
        const bool bytes = element_bits(element) == 8;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            const i64 place = first + i * step;
            bits[i] = bytes ? row[place] : reinterpret_cast<const u16 *>(row)[place];
        }
        if (!bytes) return;
#pragma unroll
        for (u32 i = 0; i < VECTOR; i++) {
            const u8 x = static_cast<u8>(bits[i]);
            bits[i] = T::store(element == FOLIO_E4M3 ? e4m3::load(x) : e5m2::load(x));
        }
    }
};

// Tokens of a tile of packed values that are not in `keys` become zeros. `first_key`: of the tile.
template <int KEYS, int DIM>
__device__ __forceinline__ void clear_hidden(u32 tile, KeyRange keys, i32 first_key) {
#pragma unroll 1
    for (u32 column = threadIdx.x % 32; column < DIM; column += 32) {
#pragma unroll 1
        for (i32 token = 0; token < KEYS; token++) {
            if (keys.holds(first_key + token)) continue;
            st_shared_half(tile + PackedValues<DIM>::offset(column, token / 8) + token % 8 * 2, 0);
        }
    }
}

}  // namespace folio
