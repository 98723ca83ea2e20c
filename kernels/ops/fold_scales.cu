// Scales that a run finds in device memory, as the attention kernels take them: those of q go into the factors of k, the
// divisor of o into those of v. A thread makes the two factors of a KV head, of a request where some scales are a request's.
#include "params/scales.h"
#include "ptx/ptx.cuh"

namespace folio {

__device__ __forceinline__ float scale_of(const FolioRowScales &scales, u32 head, i64 request) {
    return scales.data ? scales.data[request * scales.request_stride + head * scales.stride] : 1.0f;
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_fold_scales(const __grid_constant__ FolioFoldScalesParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const i64 at = static_cast<i64>(blockIdx.x) * FOLIO_THREADS + threadIdx.x, request = at / p.num_kv_heads;
    const u32 head = at - request * p.num_kv_heads;
    if (request >= p.num_requests) return;
    p.k_out[at] = scale_of(p.q, head, request) * scale_of(p.k, head, request);
    p.v_out[at] = scale_of(p.v, head, request) / (p.o ? *p.o : 1.0f);
}
