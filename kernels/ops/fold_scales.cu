// Scales that a run finds in device memory, as the attention kernels take them: those of q go into the factors of k, the
// divisor of o into those of v. A thread makes the two factors of a KV head.
#include "params/scales.h"
#include "ptx/ptx.cuh"

namespace folio {

__device__ __forceinline__ float scale_of(const FolioRowScales &scales, u32 head) {
    return scales.data ? scales.data[head * scales.stride] : 1.0f;
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_fold_scales(const __grid_constant__ FolioFoldScalesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 head = blockIdx.x * FOLIO_THREADS + threadIdx.x;
    if (head >= p.num_kv_heads) return;
    p.k_out[head] = scale_of(p.q, head) * scale_of(p.k, head);
    p.v_out[head] = scale_of(p.v, head) / (p.o ? *p.o : 1.0f);
}
