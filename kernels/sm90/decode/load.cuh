// How the warps of the decode kernel fill their rings of K/V stages, of which a key group of warps has one: by TMA boxes, or by gathering rows with
// cp.async where pages are too small for a box, or strides do not fit a tensor map. Both leave zeros for keys in pages
// that no row sees or that the cache does not have. No arithmetic on keys or values.
//
// A stage is K then V, each [swizzle atom][box][KV head][tokens of a box / 8][8 rows]. Neighbouring heads are loaded
// together because their rows are neighbours in memory: at 128 bytes a row, DRAM gives 5 % more for two heads at a time.
//
// The problem's rows may be narrower than the kernel's. The columns that are not there are not read; they are zeros.
#pragma once

#include "core/cache.cuh"
#include "params/decode.h"
#include "ptx/tma.cuh"
#include "sm90/decode/tile.cuh"

namespace folio::decode {

// Heads and tokens per tile, dims and storage of rows, bytes beside the rows of a token and head, and the rings of one
// instantiation: up to MOST_BYTES of rows, and FREE_BYTES for all that a stage has. Warps of a key group read the same
// tiles for different query rows.
template <int HEADS_, int TILE_TOKENS_, int DIM_QK, int DIM_VO, class Cache_, int BYTES_BESIDE, int KEY_GROUPS_,
          int GROUP_WARPS_, int MOST_BYTES, int FREE_BYTES>
struct RingShape {
    using Cache = Cache_;
    static constexpr int HEADS = HEADS_, TILE_TOKENS = TILE_TOKENS_;
    static constexpr int K_ROW_BYTES = Cache::row_bytes(DIM_QK), V_ROW_BYTES = Cache::row_bytes(DIM_VO);
    using KTile = RowTile<K_ROW_BYTES, HEADS * TILE_TOKENS>;
    using VTile = RowTile<V_ROW_BYTES, HEADS * TILE_TOKENS>;
    static constexpr int KEY_GROUPS = KEY_GROUPS_, GROUP_WARPS = GROUP_WARPS_;
    static constexpr int K_BYTES = HEADS * TILE_TOKENS * K_ROW_BYTES, V_BYTES = HEADS * TILE_TOKENS * V_ROW_BYTES;
    static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
    static constexpr int STAGE_BYTES_BESIDE = HEADS * TILE_TOKENS * BYTES_BESIDE;
    static constexpr int MOST_STAGES = MOST_BYTES / (KEY_GROUPS * STAGE_BYTES);
    static constexpr int STAGES_WITH_ROOM = FREE_BYTES / (KEY_GROUPS * (STAGE_BYTES + STAGE_BYTES_BESIDE));
    static constexpr int STAGES = MOST_STAGES < STAGES_WITH_ROOM ? MOST_STAGES : STAGES_WITH_ROOM;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int ALL_RINGS_BYTES = KEY_GROUPS * RING_BYTES;
    static constexpr int RING_BYTES_BESIDE = STAGES * STAGE_BYTES_BESIDE;
    static constexpr int ALL_RINGS_BYTES_BESIDE = KEY_GROUPS * RING_BYTES_BESIDE;
    // A lane holds the place of one token in GatherLoader.
    static_assert(TILE_TOKENS == 16 || TILE_TOKENS == 32);
    static_assert(STAGES >= 2);
};

// Byte distances inside a stage, for rows of a RowTile: tokens of a head that share a box lie together, and the box's other
// heads lie between them and those of the next box.
template <class Shape, class Rows>
struct StageStrides {
    u32 group, block, head;  // from 8 tokens to the next 8 of a block of 16; from block to block; from head to head

    explicit __device__ __forceinline__ StageStrides(u32 boxes_log2)
        : group(distance(boxes_log2, 8)),
          block(distance(boxes_log2, 16)),
          head(Shape::TILE_TOKENS * Rows::ATOM_BYTES >> boxes_log2) {}

private:
    // Over so many tokens of a head, to those behind them.
    static __device__ __forceinline__ u32 distance(u32 boxes_log2, u32 tokens) {
        const u32 bytes = tokens * Rows::ATOM_BYTES;
        const bool share_box = Shape::TILE_TOKENS >> boxes_log2 > tokens;
        return Shape::HEADS == 1 || share_box ? bytes : Shape::HEADS * bytes;
    }
};

// Where a token's row is: a page id, or -1 for a row of zeros, and the token within the page.
struct TokenPlace {
    int page, token;
};

// A warp's place: warps of a key group share a ring, which the one of row group 0 fills.
struct WarpPlace {
    u32 key_group, row_group;

    // Until all warps of the key group are here. What they did to shared memory is then seen by all of them.
    template <class Shape>
    __device__ __forceinline__ void sync_group() const {
        if constexpr (Shape::GROUP_WARPS == 1) {
            __syncwarp();
        } else {
            asm volatile("bar.sync %0, %1;" ::"r"(key_group + 1), "n"(32 * Shape::GROUP_WARPS) : "memory");
        }
    }
};

// The keys of one work item, as a loader needs them.
struct KeySpan {
    const i32 *page_ids;  // of the request
    int begin, end;       // keys that some row sees
    int first;            // first key of tile 0, a multiple of the tile
    u32 head;             // first KV head
};

// One elected lane issues a box per page and tensor; page ids are fetched by the whole warp, 32 boxes at a
// time and one fetch ahead, so that no load waits for an id inside the loop.
template <class Shape>
class TmaLoader {
public:
    static constexpr bool ZERO_FILLS_ROWS = false, BY_CP_ASYNC = false;

    __device__ __forceinline__ TmaLoader(const TensorMap *k_map, const TensorMap *v_map,
                                         const FolioPaddedDecodeParams &params, u32 ring, u32 barriers, WarpPlace place,
                                         u32 lane)
        : k_map(k_map), v_map(v_map), params(params), ring(ring), barriers(barriers), place(place), lane(lane) {
        if (place.row_group == 0 && lane == 0) {
            for (int i = 0; i < Shape::STAGES; ++i) mbarrier_init(barriers + 8 * i, 1);
            mbarrier_init_fence();
            tensor_map_prefetch(k_map);
            tensor_map_prefetch(v_map);
        }
        place.sync_group<Shape>();
    }

    __device__ __forceinline__ void begin(const KeySpan &span, int tiles) {
        this->span = span;
        this->tiles = place.row_group == 0 ? tiles : 0;
        const Box first = fetch(0);
        next = fetch(32);
        current = located(first);
    }

    // Makes the key group's tile `i` the current one, if there is such a tile. Called with i = 0, 1, 2 ...
    __device__ __forceinline__ void advance(int i) {
        if (i >= tiles || i == 0 || first_slot(i) != 0) return;
        current = located(next);
        next = fetch((i << params.boxes_log2) + 32);
    }

    // Of the current tile, which is tile `i`. All lanes call this together.
    __device__ __forceinline__ TokenPlace place_of(int i, u32 token) const {
        const u32 box_tokens = Shape::TILE_TOKENS >> params.boxes_log2;
        const u32 slot = first_slot(i) + (token << params.boxes_log2) / Shape::TILE_TOKENS;
        const int page = __shfl_sync(FULL_WARP, current.page, slot);
        const int group = __shfl_sync(FULL_WARP, current.group, slot);
        return {page, static_cast<int>(8 * group + (token & (box_tokens - 1)))};
    }

    // Starts the load of the current tile `i` into `stage`, if there is one.
    __device__ __forceinline__ void issue(int i, int stage) {
        if (i >= tiles) return;
        const u32 slot = first_slot(i), end = slot + (1u << params.boxes_log2);
        const u32 barrier = barriers + 8 * stage;
        u32 k = ring + stage * Shape::STAGE_BYTES, v = k + Shape::K_BYTES;
        if (lane == 0) mbarrier_arrive_expect(barrier, Shape::STAGE_BYTES);
        u32 from = slot;
#pragma unroll 1
        do {
            const int k_at = __shfl_sync(FULL_WARP, current.k, from), v_at = __shfl_sync(FULL_WARP, current.v, from);
            const int group = __shfl_sync(FULL_WARP, current.group, from);
            if (elect_lane()) {
                load<typename Shape::KTile>(k_map, k, barrier, k_at, group, params.k_column_boxes);
                load<typename Shape::VTile>(v_map, v, barrier, v_at, group, params.v_column_boxes);
            }
            k += Shape::KTile::ATOM_STRIDE >> params.boxes_log2;
            v += Shape::VTile::ATOM_STRIDE >> params.boxes_log2;
        } while (++from < end);
    }

    // Until the oldest tile in flight is in `stage`; `parity` counts the rounds of the ring.
    __device__ __forceinline__ void wait(int stage, u32 parity) const { mbarrier_wait(barriers + 8 * stage, parity); }

private:
    struct Box {
        int page, group;  // page id, or -1: a box outside the tensor, which arrives as zeros; group of 8 tokens
    };
    // And its coordinate that counts pages, in k and in v: worked out once by a lane, since an elected lane waits for it.
    struct Located : Box {
        int k, v;
    };

    // The lane that has the first box of tile `i`.
    __device__ __forceinline__ u32 first_slot(int i) const { return (i << params.boxes_log2) & 31; }

    // Box `n` + lane of this key group's boxes.
    __device__ __forceinline__ Box fetch(int n) const {
        const int box = n + static_cast<int>(lane);
        const int tile = box >> params.boxes_log2;
        const int box_tokens = Shape::TILE_TOKENS >> params.boxes_log2;
        const int token = span.first +
                          (tile * Shape::KEY_GROUPS + static_cast<int>(place.key_group)) * Shape::TILE_TOKENS +
                          (box - (tile << params.boxes_log2)) * box_tokens;
        if (token >= span.end || token + box_tokens <= span.begin) return {-1, 0};
        const u32 page = static_cast<u32>(token) / params.attention.page_size;
        return {span.page_ids[page], static_cast<int>((token - page * params.attention.page_size) >> 3)};
    }

    // A page id that the cache does not have counts as a box outside the tensor. Asked when the id is used, not when it
    // is fetched: nothing is to wait for it then.
    __device__ __forceinline__ Located located(const Box &box) const {
        const bool is_inside = static_cast<u32>(box.page) < params.attention.num_pages;
        const int page = is_inside ? box.page : -1, group = is_inside ? box.group : 0;
        const int in_page = params.pages_by_head ? static_cast<int>(span.head) : group;
        return {{page, group},
                page * static_cast<int>(params.k_page_step) + in_page,
                page * static_cast<int>(params.v_page_step) + in_page};
    }

    // A box of tokens, or of each atom of their rows: what of an atom is outside the tensor arrives as zeros.
    template <class Rows>
    __device__ __forceinline__ void load(const TensorMap *map, u32 to, u32 barrier, int at, int group,
                                         u32 column_boxes) const {
        const int c2 = params.pages_by_head ? group : at, c3 = params.pages_by_head ? at : static_cast<int>(span.head);
        u32 atom = 0;
#pragma unroll 1
        do {
            tma_load_5d(to, map, barrier,
                        atom * (Rows::ATOM_BYTES / static_cast<int>(sizeof(typename Shape::Cache::Unit))), 0, c2, c3, 0,
                        params.kv_evict_first ? EVICT_FIRST : EVICT_NORMAL);
            to += Rows::ATOM_STRIDE;
        } while (++atom < column_boxes);
    }

    const TensorMap *k_map, *v_map;
    const FolioPaddedDecodeParams &params;
    u32 ring, barriers;
    WarpPlace place;
    u32 lane;
    KeySpan span;
    int tiles;
    Located current;
    Box next;
};

// Every lane copies 16-byte pieces of rows, or of 8 bytes where rows begin at odd multiples of 8, wherever the rows are;
// lane t holds the place of token t of the next tile. Keys that no row sees are not read and become zeros.
template <class Shape>
class GatherLoader {
public:
    static constexpr bool ZERO_FILLS_ROWS = true, BY_CP_ASYNC = true;

    __device__ __forceinline__ GatherLoader(const TensorMap *, const TensorMap *, const FolioPaddedDecodeParams &params,
                                            u32 ring, u32, WarpPlace place, u32 lane)
        : params(params), ring(ring), place(place), lane(lane) {}

    __device__ __forceinline__ void begin(const KeySpan &span, int tiles) {
        this->span = span;
        this->tiles = place.row_group == 0 ? tiles : 0;
        next = fetch(0);
    }

    __device__ __forceinline__ void advance(int i) {
        if (i >= tiles) return;
        // A page that the cache does not have is none.
        current = static_cast<u32>(next.page) < params.attention.num_pages ? next : TokenPlace{-1, 0};
        next = fetch(i + 1);
    }

    __device__ __forceinline__ TokenPlace place_of(int, u32 token) const {
        return {__shfl_sync(FULL_WARP, current.page, token), __shfl_sync(FULL_WARP, current.token, token)};
    }

    __device__ __forceinline__ void issue(int i, int stage) {
        if (i < tiles) {
            const u32 k = ring + stage * Shape::STAGE_BYTES;
            if (params.row_alignment >= 16) {
                copy<16>(k, current);
            } else {
                copy<8>(k, current);
            }
        }
        // A group per call, empty or not: wait() counts calls.
        cp_async_commit();
    }

    __device__ __forceinline__ void wait(int, u32) const {
        cp_async_wait<Shape::STAGES - 1>();
        place.sync_group<Shape>();
    }

private:
    // None for a key that no row sees.
    __device__ __forceinline__ TokenPlace fetch(int tile) const {
        const int token = span.first +
                          (tile * Shape::KEY_GROUPS + static_cast<int>(place.key_group)) * Shape::TILE_TOKENS +
                          static_cast<int>(lane);
        if (lane >= Shape::TILE_TOKENS || token >= span.end || token < span.begin) return {-1, 0};
        const u32 page = static_cast<u32>(token) / params.attention.page_size;
        return {span.page_ids[page], static_cast<int>(token - page * params.attention.page_size)};
    }

    template <u32 PIECE_BYTES>
    __device__ __forceinline__ void copy(u32 stage, const TokenPlace &from) const {
        const FolioAttentionParams &p = params.attention;
        copy<PIECE_BYTES, typename Shape::KTile>(p.k, Shape::Cache::row_bytes(params.head_dim_qk), stage, from);
        copy<PIECE_BYTES, typename Shape::VTile>(p.v, Shape::Cache::row_bytes(params.head_dim_vo),
                                                 stage + Shape::K_BYTES, from);
    }

    // Rows of which row_bytes are there. As many lanes as an atom has pieces keep a token's address for all atoms of its heads,
    // neighbours in memory, and a lane's place in an atom is the same in all of them. So a piece takes no arithmetic: to find
    // the token and the place of every piece took more instructions than all products of the tile.
    template <u32 PIECE_BYTES, class Rows>
    __device__ __forceinline__ void copy(const FolioCache &cache, u32 row_bytes, u32 tile,
                                         const TokenPlace &from) const {
        constexpr u32 PIECES = Rows::ATOM_BYTES / PIECE_BYTES, TOKENS = 32 / PIECES;
        constexpr u32 ROUNDS = Shape::TILE_TOKENS / TOKENS, ROUNDS_AT_ONCE = PIECE_BYTES == 16 ? ROUNDS : 1;
        constexpr u32 ATOMS = Rows::ROW_CHUNKS / Rows::ATOM_CHUNKS;
        static_assert(ROUNDS * TOKENS == Shape::TILE_TOKENS);
        // Null for rows of zeros.
        const u64 own = from.page < 0 ? 0
                                      : reinterpret_cast<u64>(Shape::Cache::first_row(cache, span.head) +
                                                              Shape::Cache::offset(cache, from.page, from.token));
        const i64 head_bytes = cache.stride_head * static_cast<i64>(sizeof(typename Shape::Cache::Unit));
        const u32 first = lane / PIECES, begin = lane % PIECES * PIECE_BYTES;
        __builtin_assume(first < TOKENS);
#pragma unroll(ROUNDS_AT_ONCE)
        for (u32 round = 0; round < ROUNDS; ++round) {
            const u32 token = round * TOKENS + first;
            const u64 source = __shfl_sync(FULL_WARP, own, token);
            const u8 *row = reinterpret_cast<const u8 *>(source + begin);
            u32 to = tile + token / 8 * Rows::GROUP_BYTES + Rows::at(token % 8, begin / 16) + begin % 16;
#pragma unroll
            for (u32 head = 0; head < Shape::HEADS; ++head) {
#pragma unroll
                for (u32 atom = 0; atom < ATOMS; ++atom) {
                    const u32 before = begin + atom * Rows::ATOM_BYTES;
                    const u32 bytes = before < row_bytes ? min(PIECE_BYTES, row_bytes - before) : 0;
                    copy_piece<PIECE_BYTES>(to + atom * Rows::ATOM_STRIDE, row + atom * Rows::ATOM_BYTES,
                                            source ? bytes : 0);
                }
                to += Shape::TILE_TOKENS * Rows::ATOM_BYTES;
                row += head_bytes;
            }
        }
    }

    // The first so many bytes of a piece, then zeros. Of 16 bytes all or none are there (row_alignment).
    template <u32 PIECE_BYTES>
    static __device__ __forceinline__ void copy_piece(u32 to, const u8 *from, u32 bytes) {
        if constexpr (PIECE_BYTES == 16) {
            cp_async_or_zeros(to, from, bytes != 0);
        } else {
            cp_async<PIECE_BYTES>(to, from, bytes);
        }
    }

    const FolioPaddedDecodeParams &params;
    u32 ring;
    WarpPlace place;
    u32 lane;
    KeySpan span;
    int tiles;
    TokenPlace current, next;
};

}  // namespace folio::decode
