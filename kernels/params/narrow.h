// The parameters of kernels/plan/narrow.cu. src/cuda/narrow_params.rs mirrors them field by field; sizes are asserted on both
// sides. No code here.
#pragma once

#include "params/params.h"

// Rows of int64, copied as int32 without gaps. Without columns: nothing.
struct FolioNarrowTable {
    const folio_i64 *from;
    folio_i32 *to;
    folio_i64 stride;  // from row to row
    folio_i64 count;   // numbers of all rows, below 2^31
    FolioDivisor columns;
    folio_u32 reserved;
};

// Every length that a batch may state, and its page ids.
#define FOLIO_NARROW_TABLES 5

struct FolioNarrowParams {
    FolioNarrowTable tables[FOLIO_NARROW_TABLES];
};

// The numbers of src/cuda/narrow_params.rs.
static_assert(sizeof(FolioNarrowTable) == 48 && sizeof(FolioNarrowParams) == 240, "narrowing");
