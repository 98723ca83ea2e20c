// Absorbed MLA for Hopper, for work that is bound by arithmetic: 64 rows (heads x tokens) x 48 keys at a time, latent
// rank 512 and 64 rotary columns, 16-bit records. One warpgroup computes scores and softmax, two sum half of the
// output's columns each; O takes half of the register file. The values are the keys' own atoms in shared memory, read
// transposed. Where the time goes and what else was tried: benches/gpu/NOTES.md.
//
// The CTAs are teams that share the items, of as many as the largest item has row tiles. One CTA runs on a multiprocessor.
// Those of a team are neighbours and have the same keys, which the second one finds in L2.
#include "sm90/mla/load.cuh"
#include "sm90/mla/outputs.cuh"
#include "sm90/mla/scores.cuh"

extern __shared__ __align__(1024) folio::u8 shared_bytes[];

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_sm90_mla(const __grid_constant__ FolioMlaHopperParams params,
                   const __grid_constant__ folio::TensorMap latent_map,
                   const __grid_constant__ folio::TensorMap rope_map) {
    using namespace folio;
    using namespace folio::mla;
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    if (threadIdx.x == 0) make_barriers(shared, 1, 1);
    if (threadIdx.x == 32) tensor_map_prefetch(&latent_map), tensor_map_prefetch(&rope_map);
    wait_for_prerequisites();
    if (threadIdx.x == 0) shared.team = Team::of_block(params);
    __syncthreads();
    // The combine kernel may start and read its part of the plan; it waits for the results itself.
    allow_dependents();
    BoxLoader loader(params, &latent_map, &rope_map, shared);
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    // 184 + 2 x 160 = 3 x 168, what the block was launched with.
    if (warpgroup == 0) {
        registers_grow<184>();
        Scores<BoxLoader>(params, shared).run();
    } else {
        registers_shrink<160>();
        if (warpgroup == 1) {
            Outputs<0, BoxLoader, HALF_COLUMNS>(params, shared, loader).run();
        } else {
            Outputs<1, BoxLoader, HALF_COLUMNS>(params, shared, loader).run();
        }
    }
}
