// The second warpgroup: the right half of the outputs, by the weights that the first one hands on.
#pragma once

#include "sm90/mla/half_outputs.cuh"
#include "sm90/mla_gather/tile.cuh"

namespace folio::mla {

class RightOutputs {
public:
    __device__ __forceinline__ RightOutputs(const FolioMlaHopperParams &p, Shared &shared) : p(p), shared(shared) {}

    __device__ __forceinline__ void run() {
        for_each_item(p, shared.team, [&](const Items &items) { attend(items); });
    }

private:
    __device__ __forceinline__ void attend(const Items &items) {
        i32 left;
        {
            const RowTile tile(p, shared.team, items.index());
            if (tile.num_rows == 0) return;
            left = tile.num_keys();
            group_sync(2, 128);  // the item before is stored
            shared.outputs[1] = tile.outputs();
        }
        sums.clear();
#pragma unroll 1
        for (; left > 0; left -= KEYS) {
            const u32 thread = thread_of_warpgroup(), row = 16 * (thread >> 5) + (thread & 31) / 4;
            const StageRows &rows = shared.rows[turn.stage()];
            mbarrier_wait(shared_address(&shared.weighted[turn.stage()]), turn.parity());
            fence_proxy_async();  // between what the loading warps wrote and wgmma
            if (rows.rescale[thread >> 5]) sums.rescale(rows.scale[row], rows.scale[row + 8]);
            sums.add(shared_address(shared.stages[turn.stage()]));
            if (left <= KEYS) sums.rescale(rows.inverse[row], rows.inverse[row + 8]);
            __syncwarp();
            if ((thread & 31) == 0) mbarrier_arrive(shared_address(&shared.released[turn.stage()]));
            ++turn.tiles;
        }
        sums.store(p, shared.outputs[1]);
    }

    const FolioMlaHopperParams &p;
    Shared &shared;
    Turn turn;
    HalfOutputs<1, 128> sums;
};

}  // namespace folio::mla
