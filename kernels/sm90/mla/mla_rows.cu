// Absorbed MLA for Hopper over 16-bit records where no box of a tensor map brings them: pages of fewer than 8 tokens, or of
// a number that is no multiple of 8. Rows and products are those of mla.cu, over 32 keys at a time; a fourth warpgroup
// copies the records row by row.
#include "sm90/mla/load_rows.cuh"
#include "sm90/mla/outputs.cuh"
#include "sm90/mla/scores.cuh"

extern __shared__ __align__(1024) folio::u8 shared_bytes[];

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_sm90_mla_rows(const __grid_constant__ FolioMlaHopperParams params) {
    using namespace folio;
    using namespace folio::mla;
    // Half of the outputs' columns by one instruction need more registers than a thread is launched with.
    constexpr int COLUMNS = HALF_COLUMNS / 2;
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    if (threadIdx.x == 0) make_barriers(shared, LOADING_THREADS, 2);
    wait_for_prerequisites();
    if (threadIdx.x == 0) shared.team = Team::of_block(params);
    __syncthreads();
    // The combine kernel may start and read its part of the plan; it waits for the results itself.
    allow_dependents();
    RowStages stages{shared};
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    // 3 x 160 + 32 = 4 x 128, what the block was launched with.
    if (warpgroup == 0) {
        registers_grow<160>();
        Scores<RowStages>(params, shared).run();
    } else if (warpgroup == 1) {
        registers_grow<160>();
        Outputs<0, RowStages, COLUMNS>(params, shared, stages).run();
    } else if (warpgroup == 2) {
        registers_grow<160>();
        Outputs<1, RowStages, COLUMNS>(params, shared, stages).run();
    } else {
        registers_shrink<32>();
        RowLoader(params, shared).run();
    }
}
