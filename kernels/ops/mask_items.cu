// Writes the rule of multi-item scoring as a custom mask of bits: a row sees the keys before the items and those of its own
// item, up to itself. Lengths and starts may lie on the device and say anything: only bytes of the room are written.
#include "params/items.h"
#include "ptx/ptx.cuh"

namespace folio {

// Keys [item, position] and those before `prefix` are seen.
struct SeenKeys {
    i64 prefix, item, position;

    __device__ __forceinline__ SeenKeys(const FolioMaskItemsParams &p, u32 request, i64 position)
        : prefix(p.starts[request]), item(position + 1), position(position) {
        const i64 of_items = position - prefix;
        if (of_items >= 0 && of_items < p.columns) item = position - p.positions[request * p.columns + of_items];
    }

    __device__ __forceinline__ bool holds(i64 key) const { return key <= position && (key < prefix || key >= item); }
};

}  // namespace folio

// Grid: blocks that share a request's bytes, requests.
extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_mask_items(const __grid_constant__ FolioMaskItemsParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 request = blockIdx.y;
    if (request >= p.counts[FOLIO_COUNT_REQUESTS]) return;
    const i64 rows = p.qo_indptr[request + 1] - p.qo_indptr[request], keys = p.kv_len[request];
    const i64 elements = rows * keys, start = p.mask_start[request];
    const i64 bytes = min((elements + 7) / 8, p.mask_bytes - start);
    for (i64 at = blockIdx.x * FOLIO_THREADS + threadIdx.x; at < bytes; at += gridDim.x * FOLIO_THREADS) {
        i64 row = 8 * at / keys, key = 8 * at - row * keys;
        SeenKeys seen(p, request, keys - rows + row);
        u32 bits = 0;
        for (u32 bit = 0; bit < 8 && row < rows; bit++) {
            bits |= static_cast<u32>(seen.holds(key)) << bit;
            if (++key < keys) continue;
            key = 0;
            if (++row < rows) seen = SeenKeys(p, request, keys - rows + row);
        }
        p.mask[start + at] = static_cast<unsigned char>(bits);
    }
}
