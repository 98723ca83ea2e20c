// Finds the slots and positions of new tokens. Some blocks take a request; those of the last one also fill what is left.
#include "core/integers.cuh"

namespace folio {

typedef FolioSlotMappingParams Params;

// The new tokens of a request.
__device__ __forceinline__ i64 count_of(const Params &p, u32 b) {
    if (p.qo_len.data) return length(p.qo_len, b);
    return clamp(length(p.qo_indptr, b + 1) - length(p.qo_indptr, b), MOST_INT32);
}

__device__ __forceinline__ void put_token(const Params &p, i64 at, i64 slot, i64 position) {
    put_id(p.slot_mapping, 0, at, slot);
    if (p.positions.data) put_id(p.positions, 0, at, position);
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_slot_mapping(const __grid_constant__ FolioSlotMappingParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 b = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    const bool is_request = b < p.batch_size, is_last = b + 1 >= p.batch_size;
    const i64 count = is_request ? count_of(p, b) : 0, num_tokens = p.slot_mapping.columns;
    const i64 first = part * FOLIO_THREADS, step = p.parts * FOLIO_THREADS;
    if (first >= count && !is_last) return;
    i64 begin = 0;
    if (p.qo_len.data) {
        begin = sum_before(b, [&](u32 other) { return count_of(p, other); });
    } else if (is_request) {
        begin = length(p.qo_indptr, b);
    }
    const i64 row = is_request ? row_of(p.rows, b) : -1;
    const i64 most = tokens_of_row(p.rows), skipped = is_request ? length(p.kv_len, b) - count : 0;
    for (i64 i = first + threadIdx.x; i < count && begin + i < num_tokens; i += step) {
        const i64 position = skipped + i;
        const bool is_there = row >= 0 && position >= 0 && position < most;
        put_token(p, begin + i, is_there ? slot_of(p.rows, row, static_cast<u32>(position)) : -1, position);
    }
    if (!is_last) return;
    for (i64 i = begin + count + first + threadIdx.x; i < num_tokens; i += step) put_token(p, i, -1, -1);
}
