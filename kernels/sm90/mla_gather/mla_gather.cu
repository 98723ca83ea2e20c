// Absorbed MLA for Hopper over fp8 records, with more rows than sm90/mla_few is for. 64 rows (heads x tokens) x 64 keys at
// a time, latent rank 512 and 64 rotary columns. One warpgroup computes scores, softmax and half of the output's columns,
// one the other half, and two take records from the cache and make 16-bit elements of them, once for all 64 rows. Values
// are the keys' own atoms in shared memory, read transposed. Products are in fp16, those of fp8_ds_mla in bf16.
//
// Clocks of a multiprocessor for a tile, by arithmetic: tensor unit 2176, shared memory 2370 (queries 72 KB, keys 72 KB,
// values and weights 80 KB, stores 72 KB at 128 bytes a clock). Measured: 3100 without loads, 4000 with e4m3 records.
//
// The CTAs are teams that share the items, of as many as the largest item has row tiles. One CTA runs on a multiprocessor.
// Those of a team are neighbours and have the same keys, which the second one finds in L2.
#include "sm90/mla_gather/load.cuh"
#include "sm90/mla_gather/outputs.cuh"
#include "sm90/mla_gather/scores.cuh"

namespace folio::mla {

#if FOLIO_DS_MLA
using Records = ScaledBytes;
#else
using Records = Bytes<FOLIO_KV>;
#endif

}  // namespace folio::mla

extern __shared__ __align__(1024) folio::u8 shared_bytes[];

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS, 1)
    folio_sm90_mla_gather(const __grid_constant__ FolioMlaHopperParams params) {
    using namespace folio;
    using namespace folio::mla;
    Shared &shared = *reinterpret_cast<Shared *>(shared_bytes);
    if (threadIdx.x == 0) make_barriers(shared, LOADING_THREADS / 32, 8);
    wait_for_prerequisites();
    if (threadIdx.x == 0) shared.team = Team::of_block(params);
    __syncthreads();
    // The combine kernel may start and read its part of the plan; it waits for the results itself.
    allow_dependents();
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    // 208 + 160 + 2 x 72 = 4 x 128, what the block was launched with.
    if (warpgroup == 0) {
        registers_grow<208>();
        Scores(params, shared).run();
    } else if (warpgroup == 1) {
        registers_grow<160>();
        RightOutputs(params, shared).run();
    } else {
        registers_shrink<72>();
        load_keys<Records>(params, shared);
    }
}
