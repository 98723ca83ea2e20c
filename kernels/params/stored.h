// The parameters of the kernels for caches in other forms than rows of plain elements. src/cuda/stored_params.rs mirrors
// them field by field; sizes are asserted on both sides. No code here.
#pragma once

#include "params/gather.h"

// src/problem/format.rs: CacheForm, but for plain rows.
enum FolioForm {
    FOLIO_FORM_TOKEN_HEAD_SCALES = 1,
    FOLIO_FORM_CHANNEL_SCALES = 2,
    FOLIO_FORM_CHANNEL_ZERO_POINTS = 3,
    FOLIO_FORM_NVFP4 = 4,
    FOLIO_FORM_PACKED_KEYS = 5,
};

// Elements of such caches, beside FolioDtype. Of the last two a byte has two, the first in the low bits.
enum FolioStoredElement { FOLIO_I8 = 5, FOLIO_I4 = 6, FOLIO_E2M1 = 7 };

// How rows of keys and of values are stored.
struct FolioStoredFormat {
    folio_u32 form;     // FolioForm
    folio_u32 element;  // FolioDtype or FolioStoredElement
};

// One of keys and values.
struct FolioStoredTensor {
    FolioCache cache;          // strides count bytes of elements that share one, and elements otherwise
    const void *scales;        // what the form has of them, or null
    const float *zero_points;  // where the form has them
    folio_i64 scales_page, scales_token, scales_head;
    folio_i64 zero_points_head;
    folio_i64 part_stride;  // elements of a row lie in parts of 1 << log2_part, so many elements apart
    folio_u32 log2_part;    // 31: the whole row
    float scale;            // of the whole tensor
    folio_u32 head_dim;
    folio_u32 vectors;  // eight elements from a multiple of eight on lie together, aligned to their bytes or to 16
};

struct FolioStored {
    FolioStoredTensor k, v;
    FolioStoredFormat format;
};

// kernels/ops/append_stored.cu.
struct FolioStoredAppendParams {
    FolioStored cache;
    FolioRows key, value;
    const void *slots;
    folio_i64 num_slots;
    FolioDivisor page_size;
    folio_u32 slot_bytes, num_kv_heads;
    folio_u32 row_dtype;    // FolioDtype
    folio_u32 row_vectors;  // rows of new tokens are 16-byte aligned and a multiple of 8 elements long
    folio_u32 log2_lanes;   // lanes of a row: up to 32
};

// kernels/ops/gather_stored.cu. Caches and scales of `gather` are not used.
struct FolioStoredGatherParams {
    FolioKvGatherParams gather;
    FolioStored cache;
};

// kernels/generic/attention_stored.cu and decode_stored.cu. Of `generic` k and v are not used.
struct FolioStoredAttentionParams {
    FolioGenericParams generic;
    FolioStored cache;
    // Rows have elements of a byte or fewer one after the other and are 16-byte aligned, and scales of blocks are 4-byte
    // aligned: they are copied to shared memory ahead of their use. Of packed keys, which decode alone copies ahead: 16 bytes
    // of a key are aligned, and so are eight neighbouring tokens of every column of values, of 16 bits; pages have a multiple
    // of eight tokens.
    folio_u32 copied_ahead;
    folio_u32 reserved;
};

// The numbers of src/cuda/stored_params.rs.
static_assert(sizeof(FolioStoredTensor) == 104 && sizeof(FolioStored) == 216, "stored caches");
static_assert(sizeof(FolioStoredAttentionParams) == 744, "attention over stored caches");
static_assert(sizeof(FolioStoredAppendParams) == 312 && sizeof(FolioStoredGatherParams) == 600, "their operators");
