// Loads of records for the Hopper MLA kernel: lanes of one warp issue a tile by TMA, a box each, because a lane that
// issues boxes one after another needs 54 clocks for each. The page id of a lane's next box is read one tile ahead. The
// warp belongs to a warpgroup that computes, so the loader keeps few registers.
#pragma once

#include "sm90/mla/tile.cuh"

namespace folio::mla {

constexpr i32 OUTSIDE = -16;  // a coordinate whose box, of at most 2 groups, reads as zeros

// A lane's box of a tile: one or two groups of 8 tokens, as pages are multiples of 8 or of 16 tokens. Whole records are
// one box; latent and rotary part in tensors of their own are two, of one group.
struct Box {
    u32 first_group;
    bool exists, rotary;

    __device__ __forceinline__ Box(const FolioMlaHopperParams &p, u32 lane) {
        const u32 boxes = GROUPS >> p.box_log2;
        rotary = lane >= boxes;
        first_group = (rotary ? lane - boxes : lane) << p.box_log2;
        exists = lane < (p.whole_records ? boxes : 2 * boxes);
    }

    // Where it goes in a stage.
    __device__ __forceinline__ u32 offset() const { return first_group * GROUP_BYTES + (rotary ? ROPE_OFFSET : 0); }
};

class BoxLoader {
public:
    __device__ __forceinline__ BoxLoader(const FolioMlaHopperParams &p, const TensorMap *latent, const TensorMap *rope,
                                         Shared &shared)
        : p(p), latent(latent), rope(rope), shared(shared), key(0), page(OUTSIDE) {}

    // None: boxes come by the proxy that products read by.
    static __device__ __forceinline__ void fence() {}

    // The first stages. Of the outputs' warpgroups, the second has the warp that loads.
    template <int HALF>
    __device__ __forceinline__ void begin() {
        if (HALF == 0 || !is_loading()) return;
        begin_item(Items(p, shared.team));
#pragma unroll 1
        for (u32 i = 0; i < STAGES && more(); ++i) issue(i);
    }

    // The half has read the stage; when both have, its next keys are requested.
    template <int HALF>
    __device__ __forceinline__ void release(u32 stage, u32 parity) {
        group_sync(2 + HALF, 128);
        if (HALF == 0) {
            if (thread_of_warpgroup() == 0) mbarrier_arrive(shared_address(&shared.released[stage]));
        } else if (is_loading() && more()) {
            mbarrier_wait(shared_address(&shared.released[stage]), parity);
            issue(stage);
        }
    }

private:
    __device__ __forceinline__ bool is_loading() const { return threadIdx.x < 256 + 32; }
    __device__ __forceinline__ bool more() const { return key < shared.end; }

    // Requests the next tile of keys, the warp's lanes together.
    __device__ __forceinline__ void issue(u32 stage) {
        const Box box(p, threadIdx.x & 31);
        const u32 filled = shared_address(&shared.filled[stage]);
        if ((threadIdx.x & 31) == 0) mbarrier_arrive_expect(filled, STAGE_BYTES);
        __syncwarp();
        if (box.exists) {
            const u32 at = static_cast<u32>(key) + GROUP * box.first_group;
            const u32 in_page = at - divide(at, p.mla.page_size) * p.mla.page_size.divisor;
            tma_load_5d(shared_address(shared.stages[stage]) + box.offset(), box.rotary ? rope : latent, filled, 0, 0,
                        0, static_cast<i32>(in_page / GROUP), page);
        }
        key += KEYS;
        if (more()) {
            look_up();
        } else {
            Items items(p, shared.team, shared.item);
            items.next();
            begin_item(items);
        }
    }

    // The keys of the first item from there on that has any.
    __device__ __forceinline__ void begin_item(Items items) {
        const bool found = find_keys(p, shared.team, items, [&](const RowTile &tile) {
            key = tile.begin;
            __syncwarp();
            shared.page_start = tile.page_start, shared.end = tile.end, shared.item = items.position();
            __syncwarp();
            look_up();
        });
        if (found) return;
        shared.end = key = 0;
        __syncwarp();
    }

    // Reads the page id of the lane's box of the next tile. What lies past the end is not read, and ids that the cache
    // does not have read as zeros.
    __device__ __forceinline__ void look_up() {
        const i32 at = key + static_cast<i32>(GROUP * Box(p, threadIdx.x & 31).first_group);
        page = OUTSIDE;
        if (at < shared.end) {
            const FolioAttentionParams &a = p.mla.attention;
            const i32 id = a.plan.page_ids[shared.page_start + divide(at, p.mla.page_size)];
            if (static_cast<u32>(id) < a.num_pages) page = id;
        }
    }

    const FolioMlaHopperParams &p;
    const TensorMap *latent, *rope;
    Shared &shared;
    i32 key, page;  // the next tile's first key, and the page of the lane's box
};

}  // namespace folio::mla
