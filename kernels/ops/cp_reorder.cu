// Puts the rows that every rank has of many requests request by request: of a request those of rank 0, then those of
// rank 1, and so on. A warp takes a row. Lengths are the device's, and unchecked: a row that no rank has is left as it
// is.
#include "core/requests.cuh"
#include "params/context_parallel.h"

namespace folio {

typedef FolioCpReorderParams Params;

// Rank and row within the rank of a row of dst.
struct Source {
    u32 rank;
    i64 row;
};

__device__ __forceinline__ bool find(const Params &p, i64 row, Source &source) {
    const u32 request = request_of_row([&](u32 b) { return p.cu_seq_lens[b]; }, p.batch_size, row);
    i64 in_request = row - p.cu_seq_lens[request];
    if (in_request < 0 || row >= p.cu_seq_lens[request + 1]) return false;
    const i64 first = p.cu_padded_lens[request], padded = p.cu_padded_lens[request + 1] - first;
    const u64 length = static_cast<u64>(max(p.context_lens[request], 0));
    const u64 round = static_cast<u64>(p.world_size) * p.interleave;
    const i64 rounds = static_cast<i64>(length / round), rest = static_cast<i64>(length % round);
    for (u32 rank = 0; rank < p.world_size; rank++) {
        const i64 own = min(max(rest - static_cast<i64>(rank) * p.interleave, 0ll), static_cast<i64>(p.interleave));
        const i64 held = min(max(rounds * p.interleave + own - p.local_start, 0ll), padded);
        if (in_request < held) {
            source = {rank, first + in_request};
            return source.row >= 0 && source.row < p.rank_rows;
        }
        in_request -= max(held, 0ll);
    }
    return false;
}

template <class Unit>
__device__ __forceinline__ void copy(const u8 *from, u8 *to, u32 bytes) {
    for (u32 i = threadIdx.x % WARP; i < bytes / sizeof(Unit); i += WARP) {
        reinterpret_cast<Unit *>(to)[i] = reinterpret_cast<const Unit *>(from)[i];
    }
}

}  // namespace folio

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_cp_reorder(const __grid_constant__ FolioCpReorderParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const i64 row = static_cast<i64>(blockIdx.x) * (FOLIO_THREADS / WARP) + threadIdx.x / WARP;
    Source source;
    if (row >= p.num_rows || !find(p, row, source)) return;
    const u8 *from =
        static_cast<const u8 *>(p.gathered) + source.rank * p.gathered_stride_rank + source.row * p.gathered_stride_row;
    u8 *to = static_cast<u8 *>(p.dst) + row * p.dst_stride_row;
    switch (p.unit_bytes) {
        case 16: copy<uint4>(from, to, p.row_bytes); break;
        case 4: copy<u32>(from, to, p.row_bytes); break;
        case 2: copy<u16>(from, to, p.row_bytes); break;
        default: copy<u8>(from, to, p.row_bytes); break;
    }
}
