// The second and third warpgroup of the Hopper MLA kernels of three: each sums weights x values for half of the 512 columns.
// They load the records, or give stages back to who does.
#pragma once

#include "sm90/mla/half_outputs.cuh"
#include "sm90/mla/tile.cuh"

namespace folio::mla {

// HALF and COLUMNS: as HalfOutputs has them. Loader: what the halves do about loads.
template <int HALF, class Loader, int COLUMNS>
class Outputs {
public:
    __device__ __forceinline__ Outputs(const FolioMlaHopperParams &p, Shared &shared, Loader &loader)
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
            Loader::fence();
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
    Loader &loader;
    Turn turn;
    HalfOutputs<HALF, COLUMNS> sums;
};

}  // namespace folio::mla
