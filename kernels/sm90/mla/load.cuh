// Loads of records for the Hopper MLA kernel: six lanes of one warp issue a tile, a box each, because a lane that issues
// boxes one after another needs 54 clocks for each. The page id of a lane's next box is read one tile ahead. The warp
// belongs to a warpgroup that computes; the loader keeps few registers.
#pragma once

#include "sm90/mla/tile.cuh"

namespace folio::mla {

constexpr int OUTSIDE = -8;  // a coordinate whose box reads as zeros

class Loader {
public:
    __device__ __forceinline__ Loader(const FolioMlaParams &p, const TensorMap *latent, const TensorMap *rope,
                                      Shared &shared)
        : p(p), latent(latent), rope(rope), shared(shared), items(p), key(0), end(0), page(OUTSIDE) {}

    // Finds the first keys.
    __device__ __forceinline__ void begin() { find_keys(); }

    __device__ __forceinline__ bool more() const { return key < end; }

    // Requests the next tile of keys, the warp's lanes together.
    __device__ __forceinline__ void issue(u32 stage) {
        const u32 lane = threadIdx.x & 31;
        const u32 filled = shared_address(&shared.filled[stage]);
        if (lane == 0) mbarrier_arrive_expect(filled, STAGE_BYTES);
        __syncwarp();
        if (lane < 2 * BOXES) {
            const u32 box = lane % BOXES, groups = BOX_TOKENS / 8;
            const u32 at = static_cast<u32>(key) + BOX_TOKENS * box;
            const u32 in_page = at - divide(at, p.page_size) * p.page_size.divisor;
            const i32 group = page == OUTSIDE ? OUTSIDE : static_cast<i32>(in_page / 8);
            const u32 stage_at = shared_address(shared.stages[stage]);
            if (lane < BOXES) {
                tma_load_5d(stage_at + box * groups * GROUP_BYTES, latent, filled, 0, 0, 0, group, page);
            } else {
                tma_load_5d(stage_at + ROPE_OFFSET + box * groups * ATOM, rope, filled, 0, 0, 0, group, page);
            }
        }
        key += KEYS;
        if (key < end) {
            look_up();
        } else {
            items.next();
            find_keys();
        }
    }

private:
    // The next item in which the CTA's rows see keys.
    __device__ __forceinline__ void find_keys() {
        key = end = 0;
        for (; items.any(); items.next()) {
            if (!items.holds()) continue;
            const RowTile tile(p, items.index());
            if (tile.num_rows == 0 || tile.num_keys() == 0) continue;
            key = tile.begin, end = tile.end;
            __syncwarp();
            shared.page_start = tile.page_start;
            __syncwarp();
            look_up();
            return;
        }
    }

    // Reads the page id of the lane's box of the next tile. What lies past the end is not read, and ids that the cache
    // does not have read as zeros.
    __device__ __forceinline__ void look_up() {
        const i32 at = key + BOX_TOKENS * static_cast<i32>((threadIdx.x & 31) % BOXES);
        page = OUTSIDE;
        if (at < end) {
            const i32 id = p.attention.plan.page_ids[shared.page_start + divide(at, p.page_size)];
            if (static_cast<u32>(id) < p.attention.num_pages) page = id;
        }
    }

    const FolioMlaParams &p;
    const TensorMap *latent, *rope;
    Shared &shared;
    Items items;
    i32 key, end, page;  // the next tile's first key, the end of the item's, and the page of the lane's box
};

}  // namespace folio::mla
