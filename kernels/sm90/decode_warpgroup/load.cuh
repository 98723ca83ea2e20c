// How the producer warps of decode_warpgroup fill stages: by TMA boxes, or row by row with cp.async where no tensor map describes the
// cache. Both leave zeros for keys in pages that no row sees or that the cache does not have. No arithmetic on keys or values.
#pragma once

#include "ptx/tma.cuh"
#include "sm90/decode_warpgroup/stages.cuh"

namespace folio::decode {

// A box brings the tokens that a page and a step have in common; warps take boxes in turn, those of keys first. Page ids are
// fetched by the whole warp, 32 boxes at a time and one fetch ahead, so that no box waits for an id.
//
// Every warp arrives at every step, also where it has no box: a warp that nobody waits for could be a round of the ring late,
// and take the parity of a barrier for that of the round before.
class BoxLoader {
public:
    static constexpr u32 ARRIVALS = PRODUCERS;
    static constexpr bool ZERO_FILLS_ROWS = false;

    __device__ __forceinline__ BoxLoader(const FolioPaddedDecodeParams &params, const TensorMap *k_map,
                                         const TensorMap *v_map, const Stages &stages, u32 warp, u32 lane)
        : params(params), k_map(k_map), v_map(v_map), stages(stages), warp(warp), lane(lane) {
        if (warp == 0 && lane == 0) {
            tensor_map_prefetch(k_map);
            tensor_map_prefetch(v_map);
        }
        const u32 boxes = 1u << params.boxes_log2;
        for (u32 n = warp; n < 2 * boxes; n += PRODUCERS) {
            step_bytes += static_cast<u32>(n < boxes ? K_BYTES : V_BYTES) >> params.boxes_log2;
        }
    }

    __device__ __forceinline__ void begin(const StepSpan &of_item, u32 of_kv_head) {
        page_ids = of_item.page_ids;
        some = of_item.some;
        first = of_item.first;
        head = static_cast<i32>(of_kv_head);
        const Box now = fetch(0);
        next = fetch(32);
        current = inside(now);
    }

    // Step `i`; called with i = 0, 1, 2 ...
    __device__ __forceinline__ void load(i32 i, const Stage &stage) {
        const u32 boxes = 1u << params.boxes_log2, slot = (i << params.boxes_log2) & 31;
        if (slot == 0 && i != 0) {
            current = inside(next);
            next = fetch((i << params.boxes_log2) + 32);
        }
        const u32 barrier = stages.full(stage), keys = stages.keys(stage);
        if (lane == 0) mbarrier_arrive_expect(barrier, step_bytes);
#pragma unroll 1
        for (u32 n = warp; n < 2 * boxes; n += PRODUCERS) {
            const u32 box = n & (boxes - 1);
            const int page = __shfl_sync(FULL_WARP, current.page, slot + box);
            const int group = __shfl_sync(FULL_WARP, current.group, slot + box);
            if (!elect_lane()) continue;
            if (n < boxes) {
                load<KTile>(k_map, keys, box, barrier, page * static_cast<int>(params.k_page_step), group);
            } else {
                load<VTile>(v_map, keys + K_BYTES, box, barrier, page * static_cast<int>(params.v_page_step), group);
            }
        }
    }

private:
    struct Box {
        int page, group;  // page id, or -1: a box outside the tensor, which arrives as zeros; group of 8 tokens
    };

    // Box `n` + lane of the item's.
    __device__ __forceinline__ Box fetch(int n) const {
        const int box_tokens = STEP_TOKENS >> params.boxes_log2;
        const int token = first + (n + static_cast<int>(lane)) * box_tokens;
        if (token >= some.end || token + box_tokens <= some.begin) return {-1, 0};
        const u32 page = static_cast<u32>(token) / params.attention.page_size;
        return {page_ids[page], static_cast<int>((token - page * params.attention.page_size) >> 3)};
    }

    // A page id that the cache does not have counts as a box outside the tensor. Asked when the id is used, not when it
    // is fetched: nothing is to wait for it then.
    __device__ __forceinline__ Box inside(Box box) const {
        return static_cast<u32>(box.page) < params.attention.num_pages ? box : Box{-1, 0};
    }

    template <class Rows>
    __device__ __forceinline__ void load(const TensorMap *map, u32 tile, u32 box, u32 barrier, int page_base,
                                         int group) const {
        static_assert(Rows::ROW_CHUNKS == Rows::ATOM_CHUNKS, "a box brings whole rows");
        const int c2 = params.pages_by_head ? group : page_base + group;
        const int c3 = params.pages_by_head ? page_base + head : head;
        tma_load_5d(tile + (box * Rows::ATOM_STRIDE >> params.boxes_log2), map, barrier, 0, 0, c2, c3, 0,
                    params.kv_evict_first ? EVICT_FIRST : EVICT_NORMAL);
    }

    const FolioPaddedDecodeParams &params;
    const TensorMap *k_map, *v_map;
    const Stages stages;
    u32 warp, lane;
    u32 step_bytes = 0;  // of the warp's boxes
    const i32 *page_ids;
    KeyRange some;
    i32 first, head;
    Box current, next;
};

// A lane copies 16-byte pieces of rows, or of 8 bytes where rows begin at odd multiples of 8. A warp has a quarter of a step's
// tokens; lane t holds the place of its token t of the next step.
class RowLoader {
public:
    static constexpr u32 ARRIVALS = 32 * PRODUCERS;
    static constexpr bool ZERO_FILLS_ROWS = true;

    __device__ __forceinline__ RowLoader(const FolioPaddedDecodeParams &params, const TensorMap *, const TensorMap *,
                                         const Stages &stages, u32 warp, u32 lane)
        : params(params), stages(stages), warp(warp), lane(lane) {}

    __device__ __forceinline__ void begin(const StepSpan &of_item, u32 of_kv_head) {
        page_ids = of_item.page_ids;
        some = of_item.some;
        first = of_item.first;
        head = of_kv_head;
        next = fetch(0);
    }

    __device__ __forceinline__ void load(i32 i, const Stage &stage) {
        // A page that the cache does not have is none.
        const Place place = static_cast<u32>(next.page) < params.attention.num_pages ? next : Place{-1, 0};
        next = fetch(i + 1);
        const u32 keys = stages.keys(stage);
        if (params.row_alignment >= 16) {
            copy<16>(keys, place);
        } else {
            copy<8>(keys, place);
        }
        mbarrier_arrive_by_copies(stages.full(stage));
    }

private:
    static constexpr u32 TOKENS = STEP_TOKENS / PRODUCERS;
    static_assert(TOKENS <= 32 && TOKENS % 8 == 0);
    struct Place {
        i32 page, token;  // page id, or -1 for a key that no row sees; token within the page
    };

    __device__ __forceinline__ Place fetch(i32 step) const {
        const i32 token = first + step * STEP_TOKENS + static_cast<i32>(warp * TOKENS + lane);
        if (lane >= TOKENS || !some.holds(token)) return {-1, 0};
        const u32 page = static_cast<u32>(token) / params.attention.page_size;
        return {page_ids[page], static_cast<i32>(token - page * params.attention.page_size)};
    }

    template <u32 PIECE_BYTES>
    __device__ __forceinline__ void copy(u32 keys, const Place &place) const {
        const FolioAttentionParams &p = params.attention;
        copy<PIECE_BYTES, KTile>(p.k, Cache::row_bytes(params.head_dim_qk), keys, place);
        copy<PIECE_BYTES, VTile>(p.v, Cache::row_bytes(params.head_dim_vo), keys + K_BYTES, place);
    }

    // Rows of which row_bytes are there; the rest of theirs becomes zeros.
    template <u32 PIECE_BYTES, class Rows>
    __device__ __forceinline__ void copy(const FolioCache &cache, u32 row_bytes, u32 tile, const Place &place) const {
        constexpr u32 PIECES = Rows::ROW_CHUNKS * 16 / PIECE_BYTES, ROWS_AT_ONCE = 32 / PIECES;
        static_assert(32 % PIECES == 0 && TOKENS % ROWS_AT_ONCE == 0);
        const u32 begin = lane % PIECES * PIECE_BYTES;
        const u32 bytes = begin < row_bytes ? min(PIECE_BYTES, row_bytes - begin) : 0;
        // Null for rows of zeros.
        const u64 own =
            place.page < 0
                ? 0
                : reinterpret_cast<u64>(Cache::first_row(cache, head) + Cache::offset(cache, place.page, place.token));
#pragma unroll 2
        for (u32 round = 0; round < TOKENS / ROWS_AT_ONCE; ++round) {
            const u32 of_warp = round * ROWS_AT_ONCE + lane / PIECES, token = warp * TOKENS + of_warp;
            const u64 source = __shfl_sync(FULL_WARP, own, of_warp);
            cp_async<PIECE_BYTES>(tile + token / 8 * Rows::GROUP_BYTES + Rows::at(token & 7, begin / 16) + begin % 16,
                                  reinterpret_cast<const u8 *>(source + begin), source ? bytes : 0);
        }
    }

    const FolioPaddedDecodeParams &params;
    const Stages stages;
    u32 warp, lane;
    const i32 *page_ids;
    KeyRange some;
    i32 first;
    u32 head;
    Place next;
};

}  // namespace folio::decode
