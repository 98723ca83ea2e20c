// What host and device agree on: plain structs that src/cuda/params.rs mirrors field by field.
// Sizes and offsets are asserted on both sides. No code lives here.
//
// Strides are in elements and 64 bits wide everywhere. Pointers that may be absent are null.
#pragma once

typedef signed int folio_i32;
typedef unsigned int folio_u32;
typedef long long folio_i64;

// src/problem/work.rs: WorkItem. Query rows [q_start, q_start + q_len) of one request against its keys
// [kv_start, kv_end), for every head. partial: first row of the partial results, or FOLIO_NO_PARTIAL.
struct FolioWorkItem {
    folio_u32 request, q_start, q_len, kv_start, kv_end, partial, cost, reserved;
};

// src/problem/work.rs: MergeItem. Row r of chunk c lies at partial row partial + c * q_len + r.
struct FolioMergeItem {
    folio_u32 request, q_start, q_len, partial, num_chunks, reserved[3];
};

#define FOLIO_NO_PARTIAL 0xffffffffu

enum FolioMask { FOLIO_MASK_CAUSAL = 0, FOLIO_MASK_FULL = 1, FOLIO_MASK_BYTES = 2, FOLIO_MASK_BITS = 3 };

enum FolioRunFlag {
    FOLIO_RUN_LSE_BASE_2 = 1,
    FOLIO_RUN_ALIBI_SQRT = 2,
};

// A [token, head, dim] tensor with unit stride on the last dimension.
struct FolioRows {
    void *data;
    folio_i64 stride_token, stride_head;
};

// A paged cache seen as [page, token in page, head, dim]; ragged K/V has one token per page.
struct FolioCache {
    void *data;
    folio_i64 stride_page, stride_token, stride_head;
};

// What plan wrote into the workspace. All of it is device memory.
struct FolioPlanView {
    const folio_i32 *qo_indptr;    // [batch_size + 1]
    const folio_i32 *kv_len;       // [batch_size]
    const folio_i64 *page_start;   // [batch_size] first entry of page_ids; ragged: first K/V row
    const folio_i32 *page_ids;     // null for ragged: page id = page_start + index
    const FolioWorkItem *items;    // the largest first
    const FolioMergeItem *merges;
    const folio_u32 *counts;       // {number of items, number of merges, batch size, 0}
    folio_u32 *next_tile;          // 0 between runs: a kernel that takes tiles by it clears it again
    float *partial_o;              // [partial row][num_qo_heads][head_dim_vo], normalised
    float *partial_lse;            // [partial row][num_qo_heads], base 2, -inf where nothing was seen
};

struct FolioAttentionParams {
    FolioPlanView plan;
    FolioRows q, o;
    FolioCache k, v;
    float *lse;                    // [token][head] or null
    folio_i64 lse_stride_token, lse_stride_head;
    const float *sinks;            // [num_qo_heads] or null
    const float *alibi_slopes;     // [num_qo_heads] or null
    const float *k_scales;         // [num_kv_heads] with stride k_scales_stride (0: one for all) or null
    const float *v_scales;
    const unsigned char *mask;     // FOLIO_MASK_BYTES / _BITS
    const folio_i64 *mask_start;   // [batch_size] first byte of a request's mask
    const folio_i32 *mm_prefix_ranges;  // [batch_size][num_mm_prefix_ranges][2], inclusive, or null
    float logits_scale;            // sm_scale * q_scale * k_scale
    float v_scale, o_scale;
    float logits_soft_cap;         // 0: off
    folio_i32 window_left, window_right;  // -1: unlimited
    folio_i32 mask_mode;           // FolioMask
    folio_u32 flags;               // FolioRunFlag
    folio_i32 k_scales_stride, v_scales_stride;
    folio_u32 num_qo_heads, num_kv_heads, page_size, num_mm_prefix_ranges;
};
