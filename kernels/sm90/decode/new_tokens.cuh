// New tokens in the decode kernel, whose queries and keys no other kernel has made. Before a CTA multiplies, its threads
// normalise and rotate the item's queries, and the keys of those new tokens that the item has, as rope_append.cu does it:
// queries go to shared memory and to where the caller wants them, keys and values to shared memory and to the cache. From there
// a warp copies them into the tile of their positions, over what the cache had when the tile was loaded. So nothing waits for
// a store to global memory, and no CTA for another.
//
// A token's key is in one item of each KV head. Code is compact on purpose: instructions come from memory too, and the first
// version, which made rows as operands in registers, took 12 us more than the attention alone.
#pragma once

#include "core/append.cuh"
#include "core/rope_rows.cuh"
#include "params/new_tokens.h"
#include "sm90/decode/query.cuh"
#include "sm90/decode/rings.cuh"

namespace folio::decode {

// All tokens are in the cache, and queries are as they are multiplied.
struct CachedTokens {
    static constexpr bool ARE_NEW = false;

    struct Fetched {};
    __device__ __forceinline__ Fetched fetch(const FolioPaddedDecodeParams &, const Item &) const { return {}; }
    __device__ __forceinline__ void fetch_angles(const FolioPaddedDecodeParams &, Fetched &) const {}
    __device__ __forceinline__ void make(const FolioPaddedDecodeParams &, const Item &, const Fetched &) const {}
    __device__ __forceinline__ void add_to_tile(const FolioPaddedDecodeParams &, const Item &, u32, const WarpPlace &,
                                                i32, u32) const {}
};

#if FOLIO_TAKES_NEW_TOKENS

// What the threads have made of an item's new tokens. A row of queries has 16 bytes of padding, so that the rows of a tile are
// in different banks.
struct alignas(16) MadeRows {
    static constexpr int PITCH = 2 * HEAD_DIM_QK + 16, CACHED_BYTES = Shape::K_ROW_BYTES;
    static_assert(HEAD_DIM_QK == HEAD_DIM_VO && Shape::K_ROW_BYTES == Shape::V_ROW_BYTES);

    u8 queries[HEADS * ROWS][PITCH];
    u8 cached[2][HEADS * ROWS][CACHED_BYTES];  // keys and values
    u32 is_kept[ROWS];                         // whether the cache gets the token
};
static_assert(sizeof(MadeRows) == FOLIO_NEW_TOKENS_BYTES && FOLIO_SHARED_BYTES % 16 == 0);
static_assert(FOLIO_SHARED_BYTES + FOLIO_NEW_TOKENS_BYTES <= BLOCK_BYTES, "two CTAs have room on a multiprocessor");

// Tokens that FolioRopeAppendParams describes: all columns of rows are the problem's, and rows move in pieces of 16 bytes.
class NewTokens {
public:
    static constexpr bool ARE_NEW = true;

    __device__ __forceinline__ NewTokens(const FolioRopeAppendParams &rope, u8 *shared)
        : rope(rope), rows(*reinterpret_cast<MadeRows *>(shared)) {}

    // A row of 16-bit elements as it came, and what else of its token it waits for.
    struct Fetched {
        AwaitedSlot slot;
        AwaitedPosition position;
        RowPieces::Fetched<f16> row;
        bool has_slot, is_rotated;
        PairAngles angles;
    };

    // The first row of this thread's group, asked for before anything else.
    __device__ __forceinline__ Fetched fetch(const FolioPaddedDecodeParams &params, const Item &item) const {
        const Rows all(item);
        const Lane lane = lane_of(rope);
        Fetched fetched = {};
        const u32 number = threadIdx.x >> rope.log2_lanes;
        if (number < all.count()) fetched = fetch(Row(params, item, all, number), lane);
        return fetched;
    }

    // Its angles, for which the position is waited for.
    __device__ __forceinline__ void fetch_angles(const FolioPaddedDecodeParams &params, Fetched &fetched) const {
        if (!fetched.is_rotated) return;
        const u32 first = VECTOR * (threadIdx.x & ((1u << rope.log2_lanes) - 1));
        const i64 position = fetched.position.value(rope);
        if (!rope.cos) {
            compute_angles(rope, position, first, fetched.angles);
            return;
        }
        const i64 at = place_of_angles(rope, position, first);
        if (rope.cos_sin_dtype == FOLIO_F32) {
            load<f32>(at, fetched.angles);
        } else if (CacheType::IS_FP8 && params.bf16_queries) {
            load<bf16>(at, fetched.angles);
        } else {
            load<Math>(at, fetched.angles);
        }
    }

    // All threads call this together.
    __device__ __forceinline__ void make(const FolioPaddedDecodeParams &params, const Item &item,
                                         const Fetched &first) const {
        if constexpr (CacheType::IS_FP8) {
            if (params.bf16_queries) return make_of<bf16>(params, item, first);
        }
        make_of<Math>(params, item, first);
    }

    // A query of a column tile, as read_query reads it.
    __device__ __forceinline__ void read_query(NarrowFragment (&fragments)[QUERY_STEPS], const Item &item,
                                               int column_tile, u32 lane) const {
        const u32 row = min(8 * (column_tile % ROW_TILES) + lane / 4, item.num_rows - 1);
        read_row(fragments, rows.queries[column_tile / ROW_TILES * ROWS + row], HEAD_DIM_QK, lane);
    }

    // Keys and values of the new tokens that the tile from the key `first` on has.
    __device__ __forceinline__ void add_to_tile(const FolioPaddedDecodeParams &params, const Item &item, u32 tile,
                                                const WarpPlace &place, i32 first, u32 lane) const {
        const NewKeys keys(item);
        const i32 begin = max(first, keys.begin), end = min(first + TILE_TOKENS, keys.end);
        if (end <= begin) return;
        if (place.row_group == 0) {
            const StageStrides<Shape, KTile> strides(params.boxes_log2);
            const u32 count = static_cast<u32>(end - begin), pieces = 2 * HEADS * count * KTile::ROW_CHUNKS;
#pragma unroll 1
            for (u32 piece = lane; piece < pieces; piece += 32) {
                const u32 chunk = piece % KTile::ROW_CHUNKS, row = piece / KTile::ROW_CHUNKS;
                const u32 key = row % count, head = row / count % HEADS, of = row / count / HEADS;
                const u32 token = begin - keys.begin + key, in_tile = begin - first + key;
                if (!rows.is_kept[token]) continue;
                const uint4 x = *reinterpret_cast<const uint4 *>(rows.cached[of][head * ROWS + token] + 16 * chunk);
                const u32 bytes[4] = {x.x, x.y, x.z, x.w};
                st_shared_v4(tile + of * Shape::K_BYTES + head * strides.head + in_tile / 16 * strides.block +
                                 in_tile / 8 % 2 * strides.group + KTile::at(in_tile % 8, chunk),
                             bytes);
            }
            fence_proxy_async();
        }
        place.sync_group<Shape>();
    }

private:
    typedef CacheType::Storage Stored;

    // The new keys that an item has. Lengths on a device may say anything: there is room for ROWS.
    struct NewKeys {
        i32 begin, end;

        explicit __device__ __forceinline__ NewKeys(const Item &item) {
            const KeyRange keys = item_keys(item);
            begin = max(item.work.position, keys.begin);
            end = min(item.work.position + static_cast<i32>(item.work.q_len), keys.end);
            end = max(min(end, begin + ROWS), begin);
        }
    };

    // The rows of an item: queries of each head, then keys, then values.
    struct Rows {
        u32 queries, keys;

        explicit __device__ __forceinline__ Rows(const Item &item) : queries(HEADS * item.num_rows) {
            const NewKeys of_item(item);
            keys = HEADS * static_cast<u32>(of_item.end - of_item.begin);
        }
        __device__ __forceinline__ u32 count() const { return queries + 2 * keys; }
    };

    // One of them.
    struct Row {
        bool is_query, is_value, is_own;  // is_own: a query whose key the item has
        i64 token;
        u32 head;    // of queries, or of keys
        u32 at;      // in MadeRows
        u32 number;  // among those of its kind and head

        __device__ __forceinline__ Row(const FolioPaddedDecodeParams &params, const Item &item, const Rows &all,
                                       u32 row) {
            const NewKeys keys(item);
            is_query = row < all.queries;
            is_value = row >= all.queries + all.keys;
            const u32 rest = is_query ? row : row - all.queries - (is_value ? all.keys : 0);
            const u32 of_head = (is_query ? all.queries : all.keys) / HEADS;
            const u32 head_of_item = HEADS == 2 && rest >= of_head;
            number = rest - head_of_item * of_head;
            at = head_of_item * ROWS + number;
            head = item.kv_head + head_of_item;
            i32 key = keys.begin + static_cast<i32>(number);
            if (is_query) {
                const PackedRow packed = packed_row(params, item, number);
                head = head * params.group_size + packed.head;
                key = item.work.position + static_cast<i32>(packed.query);
            }
            token = static_cast<i64>(item.work.q_token) + (key - item.work.position);
            is_own = key >= keys.begin && key < keys.end;
        }
    };

    // Any row that there is, where a key is none of the append's.
    __device__ __forceinline__ i64 existing(const Row &row) const {
        return row.is_query ? row.token : min(row.token, rope.append.num_tokens - 1);
    }

    __device__ __forceinline__ Fetched fetch(const Row &row, const Lane &lane) const {
        const FolioRows &source = row.is_query ? rope.q : row.is_value ? rope.append.v.source : rope.append.k.source;
        const i64 token = existing(row);
        Fetched fetched;
        fetched.is_rotated = lane.is_rotated && !row.is_value;
        if (fetched.is_rotated) fetched.position.ask(rope, token);
        fetched.has_slot = !row.is_query && token == row.token;
        if (fetched.has_slot) fetched.slot.ask(rope.append, token);
        fetched.row = lane.pieces.fetched<f16>(row_of<f16>(source, token, row.head), true);
        return fetched;
    }

    template <class Source>
    __device__ __forceinline__ void make_of(const FolioPaddedDecodeParams &params, const Item &item,
                                            const Fetched &first) const {
        const Rows all(item);
        Lane lane = lane_of(rope);
        Fetched fetched = first;
#pragma unroll 1
        for (u32 number = threadIdx.x >> rope.log2_lanes; number < all.count();) {
            const Row row(params, item, all, number);
            make_row<Source>(row, fetched, lane);
            number += THREADS >> rope.log2_lanes;
            if (number >= all.count()) break;
            fetched = fetch(Row(params, item, all, number), lane);
            fetch_angles(params, fetched);
        }
        __syncthreads();
    }

    template <class Source>
    __device__ __forceinline__ void make_row(const Row &row, const Fetched &fetched, Lane &lane) const {
        const RowPieces::Fetched<Source> in = of_type<Source>(fetched.row);
        lane.pieces.take(in);
        if (!row.is_value) {
            lane.angles = fetched.angles;
            const void *const weight = row.is_query ? rope.q_weight : rope.k_weight;
            const u32 dtype = row.is_query ? rope.q_weight_dtype : rope.k_weight_dtype;
            compute_row<Source>(rope, lane, weight, dtype, true);
        }
        if (row.is_query) {
            store_row<Source>(lane.pieces, reinterpret_cast<u16 *>(rows.queries[row.at]), true);
            if (row.is_own) store_row<Source>(lane.pieces, row_of<f16>(rope.q_out, row.token, row.head), true);
            return;
        }
        const i64 index = fetched.has_slot ? fetched.slot.value(rope.append) : -1;
        const bool is_kept = index >= 0 && index < rope.append.num_slots;
        if (lane.index == 0 && !row.is_value) rows.is_kept[row.number] = is_kept;
        if (!is_kept) return;
        const FolioAppendTensor &tensor = row.is_value ? rope.append.v : rope.append.k;
        const CacheSlot slot = place(rope.append, index);
        Stored *const cached = CacheRows<CacheType>::row(tensor.cache, slot.page, slot.token, row.head);
        const RowPieces::Fetched<CacheType> out = as_cached(in, tensor, row, lane);
        store(out, lane, reinterpret_cast<Stored *>(rows.cached[row.is_value][row.at]));
        store(out, lane, cached);
    }

    // As the cache has a row: values of 16 bits are not computed with.
    template <class Source>
    __device__ __forceinline__ RowPieces::Fetched<CacheType> as_cached(const RowPieces::Fetched<Source> &in,
                                                                       const FolioAppendTensor &tensor, const Row &row,
                                                                       const Lane &lane) const {
        if constexpr (!CacheType::IS_FP8) {
            if (row.is_value) return in;
        }
        const CacheRounding<CacheType> rounding(tensor, row.head);
        RowPieces::Fetched<CacheType> out;
#pragma unroll
        for (u32 half = 0; half < 2; half++) out.halves[half].elements = rounding.vector(lane.pieces.x[half]);
        return out;
    }

    static __device__ __forceinline__ void store(const RowPieces::Fetched<CacheType> &row, const Lane &lane,
                                                 Stored *target) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const RowPieces &pieces = lane.pieces;
            if (pieces.count[half] > 0) row.halves[half].store(target + pieces.begin[half], VECTOR, true);
        }
    }

    template <class Source>
    static __device__ __forceinline__ RowPieces::Fetched<Source> of_type(const RowPieces::Fetched<f16> &row) {
        RowPieces::Fetched<Source> same;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            same.halves[half].elements.vectors[0] = row.halves[half].elements.vectors[0];
        }
        return same;
    }

    template <class T>
    __device__ __forceinline__ void load(i64 at, PairAngles &angles) const {
        load_numbers<T>(angles.cos, static_cast<const typename T::Storage *>(rope.cos) + at, VECTOR, true);
        load_numbers<T>(angles.sin, static_cast<const typename T::Storage *>(rope.sin) + at, VECTOR, true);
    }

    const FolioRopeAppendParams &rope;
    MadeRows &rows;
};

#endif

}  // namespace folio::decode
