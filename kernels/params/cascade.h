// The parameters of kernels/plan/plan_cascade.cu. src/cuda/cascade_params.rs mirrors them field by field; sizes are asserted
// on both sides. No code here.
#pragma once

#include "params/plan.h"

// Keys that neighbouring requests share, as src/plan/cascade_device.rs chose them: those up to `keys`, a multiple of kv_unit,
// beyond those of the segment around it. They come in the order of their first requests, the wider ones first.
struct FolioSharedSegment {
    folio_u32 begin, end;  // requests
    folio_u32 keys;
    folio_u32 parent;  // a segment before it, or FOLIO_NO_SEGMENT
};

#define FOLIO_NO_SEGMENT 0xffffffffu

// As many as fit into the 4 KiB that a kernel's parameters have.
#define FOLIO_SHARED_SEGMENTS 240

// What the kernel keeps of a request, or of a segment, beside a FolioPlanRequest.
struct FolioPlanShare {
    folio_u32 end;         // of the keys, counted from the request's first one
    folio_u32 request;     // whose pages are read
    folio_u32 parent;      // the entry around it, or FOLIO_NO_SEGMENT
    folio_u32 first_part;  // of a request: its first entry in the list of partial rows
};

// The entries that the kernel keeps are the requests and, behind them, the segments. `plan.requests`, `first_item` and
// `first_combine` have one for each, as `shares` has.
struct FolioPlanCascadeParams {
    FolioPlanParams plan;
    FolioPlanShare *shares;  // [batch_size + num_segments]
    folio_u32 num_segments, reserved;
    FolioSharedSegment segments[FOLIO_SHARED_SEGMENTS];
};

// The numbers of src/cuda/cascade_params.rs.
static_assert(sizeof(FolioSharedSegment) == 16 && sizeof(FolioPlanShare) == 16, "segments");
static_assert(sizeof(FolioPlanCascadeParams) == 4096, "planning cascades");
