// The second and third warpgroup of the Hopper MLA kernel: each sums weights x values for half of the 512 columns, and
// takes part in loading the records.
#pragma once

#include "sm90/mla/half_outputs.cuh"
#include "sm90/mla/load.cuh"

namespace folio::mla {

// HALF: 0 or 1.
template <int HALF>
class Outputs {
public:
    __device__ __forceinline__ Outputs(const FolioMlaHopperParams &p, Shared &shared, BoxLoader &loader)
        : p(p), shared(shared), loader(loader) {}

    __device__ __forceinline__ void run() {
        loader.template begin<HALF>();
        for_each_item(p, shared.team, [&](const Items &items) { attend(items); });
    }

private:
    __device__ __forceinline__ void attend(const Items &items) {
        i32 left;
        {
            const RowTile tile(p, shared.team, items.index());
            if (tile.num_rows == 0) return;
            left = tile.num_keys();
            group_sync(4 + HALF, 128);  // the item before is stored
            shared.outputs[1 + HALF] = tile.outputs();
        }
        sums.clear();
#pragma unroll 1
        for (; left > 0; left -= KEYS) {
            mbarrier_wait(shared_address(&shared.weighted[turn.stage()]), turn.parity());
            const StageRows &rows = shared.rows[turn.stage()];
            const u32 thread = thread_of_warpgroup(), row = 16 * (thread >> 5) + (thread & 31) / 4;
            if (rows.rescale[thread >> 5]) sums.rescale(rows.scale[row], rows.scale[row + 8]);
            sums.add(shared_address(shared.stages[turn.stage()]));
            if (left <= KEYS) sums.rescale(rows.inverse[row], rows.inverse[row + 8]);
            loader.template release<HALF>(turn.stage(), turn.parity());
            ++turn.tiles;
        }
        sums.store(p, shared.outputs[1 + HALF]);
    }

    const FolioMlaHopperParams &p;
    Shared &shared;
    BoxLoader &loader;
    Turn turn;
    HalfOutputs<HALF> sums;
};

}  // namespace folio::mla
