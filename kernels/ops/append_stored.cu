// Writes new tokens to a paged cache in another form than rows of plain elements, keys and values in one launch, and
// computes the scales that the form has beside the cache. A CTA takes one token, and a group of lanes a row of it. Tokens
// with negative slots, or with slots past the cache, are skipped.
#include "core/append_stored.cuh"

namespace folio {

typedef FolioStoredAppendParams Params;

__device__ __forceinline__ void append_token(const Params &p, i64 token) {
    const i64 index = integer(p.slots, p.slot_bytes, token);
    if (index < 0 || index >= p.num_slots) return;
    const StoredSlot slot = stored_slot(index, p.page_size);
    const Group group(p.log2_lanes);
    // Keys of all heads, and then values.
    for (u32 row = threadIdx.x >> p.log2_lanes; row < 2 * p.num_kv_heads; row += FOLIO_THREADS >> p.log2_lanes) {
        const bool is_key = row < p.num_kv_heads;
        const u32 head = is_key ? row : row - p.num_kv_heads;
        const FolioStoredTensor &t = is_key ? p.cache.k : p.cache.v;
        const FolioRows &rows = is_key ? p.key : p.value;
        const NumberRow from = NumberRow::of(rows, token, head, p.row_dtype, p.row_vectors);
        append_row(t, p.cache.format, slot, head, group, from);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_append_stored(const __grid_constant__ FolioStoredAppendParams p) {
    folio::wait_for_prerequisites();
    folio::append_token(p, blockIdx.x);
}
