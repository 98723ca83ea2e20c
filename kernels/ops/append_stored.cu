// Writes new tokens to a paged cache in another form than rows of plain elements, keys and values in one launch, and
// computes the scales that the form has beside the cache. A CTA takes one token, and a group of lanes a row of it. Tokens
// with negative slots, or with slots past the cache, are skipped.
#include "core/append_stored.cuh"

namespace folio {

typedef FolioStoredAppendParams Params;

// A row of a token: its keys of all heads, and then its values.
struct TokenRow {
    bool is_there, is_key;
    u32 head;

    __device__ __forceinline__ TokenRow(const Params &p, u32 row)
        : is_there(row < 2 * p.num_kv_heads), is_key(row < p.num_kv_heads) {
        head = !is_there ? 0 : is_key ? row : row - p.num_kv_heads;
    }

    __device__ __forceinline__ const FolioStoredTensor &tensor(const Params &p) const {
        return is_key ? p.cache.k : p.cache.v;
    }

    __device__ __forceinline__ NumberRow numbers(const Params &p, i64 token) const {
        return NumberRow::of(is_key ? p.key : p.value, token, head, p.row_dtype, p.row_vectors);
    }
};

__device__ __forceinline__ void append_token(const Params &p, i64 token) {
    const i64 index = integer(p.slots, p.slot_bytes, token);
    if (index < 0 || index >= p.num_slots) return;
    const StoredSlot slot = stored_slot(index, p.page_size);
    const Group group(p.log2_lanes);
    const u32 groups = FOLIO_THREADS >> p.log2_lanes, of_warp = 32 >> p.log2_lanes;
    // The rows of a warp's groups end together.
    const u32 end = (2 * p.num_kv_heads + of_warp - 1) / of_warp * of_warp;
    for (u32 i = threadIdx.x >> p.log2_lanes; i < end; i += groups) {
        const TokenRow row(p, i);
        append_row(row.tensor(p), p.cache.format, slot, row.head, group, row.numbers(p, token), row.is_there);
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_append_stored(const __grid_constant__ FolioStoredAppendParams p) {
    folio::allow_dependents();  // what attends to the tokens prepares itself meanwhile
    folio::wait_for_prerequisites();
    folio::append_token(p, blockIdx.x);
}
