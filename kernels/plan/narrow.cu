// Lengths and page ids of int64 as int32, for plans on the device. Numbers that do not fit become the nearest that do, and are
// as wrong for whoever reads them. A row of blocks takes a table.
#include "core/paged.cuh"
#include "params/narrow.h"
#include "ptx/ptx.cuh"

extern "C" __global__ void __launch_bounds__(FOLIO_THREADS) folio_narrow(const __grid_constant__ FolioNarrowParams p) {
    using namespace folio;
    wait_for_prerequisites();
    const FolioNarrowTable &table = p.tables[blockIdx.y];
    const u32 at = blockIdx.x * FOLIO_THREADS + threadIdx.x;
    if (at >= table.count) return;
    const u32 row = divide(at, table.columns), column = at - row * table.columns.divisor;
    const i64 number = table.from[row * table.stride + column];
    table.to[at] = static_cast<i32>(min(max(number, -0x80000000ll), 0x7fffffffll));
}
