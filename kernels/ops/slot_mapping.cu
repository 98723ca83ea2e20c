// Finds the slots and positions of new tokens, and fills what is left of the outputs. A thread takes a token.
#include "core/starts.cuh"

namespace folio {

typedef FolioSlotMappingParams Params;

// The new tokens of a request.
struct Count {
    const Params &p;

    __device__ __forceinline__ i64 operator()(u32 b) const {
        if (p.qo_len.data) return length(p.qo_len, b);
        return clamp(length(p.qo_indptr, b + 1) - length(p.qo_indptr, b), MOST_INT32);
    }
};

__device__ __forceinline__ void put_token(const Params &p, i64 at, i64 slot, i64 position) {
    put_id(p.slot_mapping, 0, at, slot);
    if (p.positions.data) put_id(p.positions, 0, at, position);
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_slot_mapping(const __grid_constant__ FolioSlotMappingParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const Count count = {p};
    const Starts starts(p.batch_size, count);
    const i64 base = p.qo_indptr.data && p.batch_size > 0 ? length(p.qo_indptr, 0) : 0, end = base + starts.total();
    const i64 warp = threadIdx.x / LANES * gridDim.x + blockIdx.x, step = static_cast<i64>(gridDim.x) * FOLIO_THREADS;
    for (i64 at = warp * LANES + threadIdx.x % LANES; at < p.slot_mapping.columns; at += step) {
        if (at < base) continue;
        if (at >= end) {
            put_token(p, at, -1, -1);
            continue;
        }
        i64 begin;
        u32 b = starts.at_or_before(at - base, begin);
        i64 own = count(b);
#pragma unroll 1
        for (; at - base >= begin + own; own = count(++b)) begin += own;
        const i64 row = row_of(p.rows, b), position = length(p.kv_len, b) - own + (at - base - begin);
        const bool is_there = row >= 0 && position >= 0 && position < tokens_of_row(p.rows);
        put_token(p, at, is_there ? slot_of(p.rows, row, static_cast<u32>(position)) : -1, position);
    }
}
