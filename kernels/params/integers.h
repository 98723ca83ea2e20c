// Integers of the caller's, of either type that the C functions take. src/cuda/integers_params.rs mirrors the struct field
// by field; sizes are asserted on both sides. No code here.
#pragma once

#include "params/params.h"

// A table of int32 or int64. A list is its one row.
struct FolioIntegers {
    void *data;                       // or null
    folio_i64 rows, columns, stride;  // between rows
    folio_u32 bytes;                  // of a number: 4 or 8
    folio_u32 reserved;
};

// The number of src/cuda/integers_params.rs.
static_assert(sizeof(FolioIntegers) == 40, "integers");
