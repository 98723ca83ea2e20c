// Makes a block table of a list. Some blocks take a row.
#include "core/integers.cuh"

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS)
    folio_block_table(const __grid_constant__ FolioBlockTableParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const u32 b = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
    const bool is_request = b < p.batch_size;
    const i64 all = p.kv_indices.columns;
    const i64 begin = is_request ? clamp(get(p.kv_indptr, 0, b), all) : 0;
    const i64 end = is_request ? clamp(get(p.kv_indptr, 0, b + 1), all) : 0;
    for (i64 i = part * FOLIO_THREADS + threadIdx.x; i < p.block_table.columns; i += p.parts * FOLIO_THREADS) {
        if (begin + i < end) {
            put_id(p.block_table, b, i, get(p.kv_indices, 0, begin + i));
        } else {
            put(p.block_table, b, i, p.fill);
        }
    }
}
