// The lse of a run, which the attention kernels write as fp32, rounded to the type of the caller's tensor. A warp takes the
// heads of a query row. Rows that the batch does not have keep what they hold.
#include "core/dtype.cuh"
#include "params/lse.h"
#include "ptx/ptx.cuh"

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_round_lse(const __grid_constant__ FolioRoundLseParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 token = blockIdx.x * (FOLIO_THREADS / 32) + threadIdx.x / 32;
    const i32 end = p.qo_indptr[p.counts[FOLIO_COUNT_REQUESTS]];
    if (token >= p.num_tokens || static_cast<i64>(token) >= end) return;
    const float *from = p.from + static_cast<i64>(token) * p.num_heads;
    u16 *to = static_cast<u16 *>(p.to) + token * p.stride_token;
    for (u32 head = threadIdx.x % 32; head < p.num_heads; head += 32) {
        to[head * p.stride_head] = p.dtype == FOLIO_F16 ? f16::store(from[head]) : bf16::store(from[head]);
    }
}
