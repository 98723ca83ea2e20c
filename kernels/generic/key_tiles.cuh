// Tiles of keys and values of plain rows, copied to shared memory by the warps that share them: which keys a lane has a
// part of, where the page table says they are, and the copies by cp.async. When a tile is asked for and awaited is the
// kernel's own. Caches in other forms have stored_tiles.cuh.
#pragma once
#include "core/tile.cuh"
#include "generic/work.cuh"

namespace folio {

// One warp's PER_WARP of the KEYS of a tile. Slots of the next tile's keys are looked up one tile ahead.
// KEEP is that of LaneRows.
template <class Cache, int KEYS, int PER_WARP, int DIM_QK, int DIM_VO, bool KEEP>
struct KeyTiles {
    static constexpr int K_BYTES = Cache::row_bytes(DIM_QK), V_BYTES = Cache::row_bytes(DIM_VO);
    // Eight lanes read whole lines of a cache, which decode is bound by (64 requests of 4k on an H200: 293 against 337 µs).
    // Four look up half as many slots, which many keys in 8 bits are bound by (191 against 201), and have eight keys in one pass.
    static constexpr bool WHOLE_LINES = PER_WARP != 8 && PER_WARP <= 16 && K_BYTES % 128 == 0 && V_BYTES % 128 == 0;
    typedef LaneRows<PER_WARP, K_BYTES, WHOLE_LINES ? 8 : 4, KEEP> KRows;
    typedef LaneRows<PER_WARP, V_BYTES, WHOLE_LINES ? 8 : 4, KEEP> VRows;
    typedef typename Cache::Unit Unit;
    static constexpr int PASSES = KRows::PASSES;

    const FolioAttentionParams &p;
    const FolioGenericParams &g;
    PageTable table;
    KeyRange keys;
    u32 kv_head, first_row;
    KRows k_rows;
    VRows v_rows;
    const Unit *k, *v;  // the head's first rows, from the lane's first column on
    i32 key;            // of the lane's first row
    KeySlot slots[PASSES];

    // `first_row` is the warp's first of the tile's.
    __device__ __forceinline__ KeyTiles(const FolioAttentionParams &p, const FolioGenericParams &g, const Work &work,
                                        KeyRange keys, i32 tile, u32 first_row)
        : p(p),
          g(g),
          table(p, *work.item, g.page_size),
          keys(keys),
          kv_head(work.kv_head),
          first_row(first_row),
          k_rows(first_row),
          v_rows(first_row),
          k(kept_if<KEEP>(Cache::first_row(p.k, kv_head) + KRows::column() * (16 / sizeof(Unit)))),
          v(kept_if<KEEP>(Cache::first_row(p.v, kv_head) + KRows::column() * (16 / sizeof(Unit)))),
          key(kept_if<KEEP>(tile * KEYS + first_row + KRows::row(0))) {
        if (keys.begin < keys.end) look_up();
    }

    __device__ __forceinline__ void copy_keys(u32 tile) const {
        const u32 bytes = Cache::row_bytes(g.head_dim_qk);
        if (g.rope_dim != 0) {
            const Unit *leading = row_of_lane(p.k, kv_head), *trailing = row_of_lane(g.k_rope, 0);
            copy_split_rows<PER_WARP, K_BYTES>(tile, first_row, leading, trailing, bytes - Cache::row_bytes(g.rope_dim),
                                               bytes, min(g.k_copy_bytes, g.k_rope_copy_bytes));
        } else {
            copy<K_BYTES>(k_rows, tile, p.k, k, bytes, g.k_copy_bytes);
        }
    }

    __device__ __forceinline__ void copy_values(u32 tile) const {
        copy<V_BYTES>(v_rows, tile, p.v, v, Cache::row_bytes(g.head_dim_vo), g.v_copy_bytes);
    }

    // The warp's rows of a tile as numbers of the type T of queries, in a tile of those.
    template <class T>
    __device__ __forceinline__ void widen_keys(u32 tile, u32 wide) const {
        k_rows.template widen<T, typename Cache::Element>(tile, typename KRows::Wide(first_row, 2), wide);
    }

    template <class T>
    __device__ __forceinline__ void widen_values(u32 tile, u32 wide) const {
        v_rows.template widen<T, typename Cache::Element>(tile, typename VRows::Wide(first_row, 2), wide);
    }

    // To the tile that is `tiles` further. There are keys.
    __device__ __forceinline__ void advance(i32 tiles) {
        key += tiles * KEYS;
        look_up();
    }

private:
    __device__ __forceinline__ bool is_visible(int pass) const { return keys.holds(key + pass * KRows::ROWS_OF_PASS); }

    // Of a key that is not visible, the nearest that is: no lane waits for another's branch.
    __device__ __forceinline__ void look_up() {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            slots[pass] = table[min(max(key + pass * KRows::ROWS_OF_PASS, keys.begin), keys.end - 1)];
        }
    }

    // Keys outside the visible range or the cache become zeros, values too: 0 * NaN must not happen in P * V.
    __device__ __forceinline__ bool is_there(int pass) const { return is_visible(pass) && table.holds(slots[pass]); }

    // Lane r has row r; null where it is not there.
    __device__ __forceinline__ const Unit *row_of_lane(const FolioCache &cache, u32 head) const {
        return KRows::of_lane([&](int pass) {
            return is_there(pass) ? Cache::row(cache, slots[pass].page, slots[pass].token, head) : nullptr;
        });
    }

    template <int BYTES, class Rows>
    __device__ __forceinline__ void copy(const Rows &rows, u32 tile, const FolioCache &cache, const Unit *first,
                                         u32 bytes, u32 copy_bytes) const {
        if (copy_bytes == 16 && bytes % 16 == 0) {
            const i32 columns = static_cast<i32>(bytes / 16 - KRows::column());
#pragma unroll
            for (int pass = 0; pass < PASSES; pass++) {
                // A page that the cache lacks may be any number: no address is made of it.
                const u32 page = min(static_cast<u32>(slots[pass].page), max(p.num_pages, 1u) - 1);
                const Unit *row = first + Cache::offset(cache, page, slots[pass].token);
                rows.copy(tile, pass, reinterpret_cast<const u8 *>(row), is_there(pass) ? columns : 0);
            }
        } else {
            copy_unaligned_rows<PER_WARP, BYTES>(tile, first_row, row_of_lane(cache, kv_head), bytes, copy_bytes);
        }
    }
};

}  // namespace folio
