// What host and device agree on: plain structs that src/cuda/params.rs mirrors field by field.
// Sizes are asserted on both sides. No code here.
//
// Strides are in elements, where nothing else is said, and 64 bits wide everywhere. Pointers that may be absent are null.
#pragma once

typedef signed int folio_i32;
typedef unsigned int folio_u32;
typedef long long folio_i64;

// src/problem/work.rs: WorkItem. Query rows [q_start, q_start + q_len) of one request against its keys
// [kv_start, kv_end), for every head.
struct FolioWorkItem {
    folio_u32 request, q_start, q_len, kv_start, kv_end;
    folio_u32 partial;  // first row of the partial results, or FOLIO_NO_PARTIAL
    folio_u32 cost, reserved;
    // Where the rows and the keys are: what would otherwise cost loads that wait for one another.
    folio_i64 page_start;  // first entry of page_ids; ragged: first K/V row
    folio_i32 q_token;     // qo_indptr of the request + q_start: row of q and o
    folio_i32 position;    // kv_len - qo_len + q_start: position of the first row, may be negative
};

// src/problem/work.rs: CombineItem. The parts of row q_token are the partial rows that partials[first, first + count)
// names.
struct FolioCombineItem {
    folio_u32 q_token, first, count, reserved;
};

#define FOLIO_NO_PARTIAL 0xffffffffu

enum FolioMask { FOLIO_MASK_CAUSAL = 0, FOLIO_MASK_FULL = 1, FOLIO_MASK_BYTES = 2, FOLIO_MASK_BITS = 3 };

enum FolioRunFlag {
    FOLIO_RUN_LSE_BASE_2 = 1,
    FOLIO_RUN_ALIBI_SQRT = 2,
    FOLIO_RUN_MASK_SKIP_PREFIX = 4,
    FOLIO_RUN_MASK_NEW_KEYS = 8,
    FOLIO_RUN_MM_PREFIX_IN_WINDOW = 16,
    // k_scales, v_scales: [batch_size][num_kv_heads]. (0x100 and 0x200 are query_type.h's.)
    FOLIO_RUN_K_SCALES_OF_REQUESTS = 0x400,
    FOLIO_RUN_V_SCALES_OF_REQUESTS = 0x800,
    // The sum that the run is added to ends with it: afterwards its lse is -inf, for the next one.
    FOLIO_RUN_ENDS_SUM = 0x4000,
};

// src/dtype.rs: DType, the element types of tensors.
enum FolioDtype { FOLIO_F32 = 0, FOLIO_F16 = 1, FOLIO_BF16 = 2, FOLIO_E4M3 = 3, FOLIO_E5M2 = 4 };

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

// Places in the counts of a plan. Behind them stands where the other items of each share begin, see `Items` of
// sm90/mla/rows.cuh.
enum FolioPlanCount {
    FOLIO_COUNT_ITEMS,
    FOLIO_COUNT_COMBINES,
    FOLIO_COUNT_REQUESTS,
    FOLIO_COUNT_SMALL_ITEMS,  // the last of the items
    FOLIO_COUNT_SHARES,
    FOLIO_COUNT_WORKERS_OF_ITEM,  // that take an item together; 0 in cascades, where none do
    FOLIO_NUM_COUNTS
};

// What plan wrote into the workspace. All of it is device memory.
struct FolioPlanView {
    const folio_i32 *qo_indptr;  // [batch_size + 1]
    const folio_i32 *kv_len;     // [batch_size]
    const folio_i32 *page_ids;   // null for ragged: page id = page_start + index
    const FolioWorkItem *items;  // the largest first
    const FolioCombineItem *combines;
    const folio_u32 *partials;  // partial rows that the combine items name
    const folio_u32 *counts;    // at FolioPlanCount
    folio_u32 *next_tile;       // 0 between runs: a kernel that takes tiles by it clears it again
    float *partial_o;           // [partial row][num_qo_heads][head_dim_vo], normalised
    float *partial_lse;         // [partial row][num_qo_heads], base 2, -inf where nothing was seen
};

struct FolioAttentionParams {
    FolioPlanView plan;
    FolioRows q, o;
    FolioCache k, v;
    float *lse;  // [token][head] or null
    folio_i64 lse_stride_token, lse_stride_head;
    const float *sinks;         // [num_qo_heads] or null
    const float *alibi_slopes;  // [num_qo_heads], of each request or of all, or null
    const float *k_scales;      // [num_kv_heads] with stride k_scales_stride (0: one for all) or null
    const float *v_scales;
    const unsigned char *mask;          // FOLIO_MASK_BYTES / _BITS
    const folio_i64 *mask_start;        // [batch_size] first byte of a request's mask, perhaps the caller's number
    const folio_i32 *mm_prefix_ranges;  // [batch_size][num_mm_prefix_ranges][2], inclusive, or null
    float logits_scale;                 // sm_scale * q_scale * k_scale
    float v_scale, o_scale;
    float logits_soft_cap;                // 0: off
    folio_i32 window_left, window_right;  // -1: unlimited
    folio_i32 mask_mode;                  // FolioMask
    folio_u32 flags;                      // FolioRunFlag
    folio_i32 k_scales_stride, v_scales_stride;
    folio_u32 num_qo_heads, num_kv_heads, page_size, num_mm_prefix_ranges;
    // What lies in device memory is unchecked: query rows, page ids and mask bytes beyond these are not accessed.
    folio_u32 num_tokens;                  // rows that q, o and lse have
    folio_u32 num_pages;                   // that k and v have; ragged: rows. At most 2^31
    folio_i64 mask_bytes;                  // of mask
    folio_u32 section_bytes;               // keys and values that a stretch of prefill may read and still find in L2
    folio_u32 k_rope_page_groups;          // Hopper prefill of split keys: 8-token groups from page to page of k_rope
    const unsigned char *causal_requests;  // [batch_size], with FOLIO_MASK_FULL: not 0 is causal; or null
    folio_u32 alibi_request_stride;        // from one request's slopes to the next's; 0: the same
    folio_u32 chunk_size;                  // of chunked local attention; 0: off
    folio_u32 chunk_look_back;
    folio_u32 reserved;
};

// n / d for n < 2^31 as (mulhi(n, multiplier) + n) >> shift.
struct FolioDivisor {
    folio_u32 divisor, multiplier, shift;
};

enum FolioBiasFlag { FOLIO_BIAS_NEW_KEYS = 1, FOLIO_BIAS_REQUEST_ROWS = 2 };

// Numbers that are added to logits. What lies beyond rows and columns is not read.
struct FolioScoreBias {
    const void *data;                                  // or null
    folio_i64 stride_head, stride_row, stride_column;  // in bytes
    folio_u32 rows, columns;
    folio_u32 dtype;  // FolioDtype: fp32, fp16 or bf16
    folio_u32 flags;  // FolioBiasFlag
    FolioDivisor group_size;
    folio_u32 reserved;
};

// What the generic attention kernels take.
struct FolioGenericParams {
    FolioAttentionParams attention;
    folio_u32 head_dim_qk, head_dim_vo;
    folio_u32 row_tiles;                                 // row tiles that the largest item needs
    folio_u32 o_dtype;                                   // FolioDtype
    folio_u32 q_copy_bytes, k_copy_bytes, v_copy_bytes;  // up to 16: what every row's address is a multiple of
    FolioDivisor page_size;
    // Split keys: k has the first head_dim_qk - rope_dim elements of a key, and k_rope, of one head, the others.
    FolioCache k_rope;
    folio_u32 rope_dim, k_rope_copy_bytes;  // 0: k has whole keys
    FolioScoreBias bias;
};

// kernels/sm90/decode/decode.cu. Keys come by TMA in boxes of a page's tokens, a tile of keys being 1 << boxes_log2
// boxes; the last three numbers say how the tensor maps count pages.
struct FolioDecodeParams {
    FolioAttentionParams attention;
    folio_u32 group_size;      // num_qo_heads / num_kv_heads
    folio_u32 o_dtype;         // FolioDtype
    folio_u32 kv_evict_first;  // the keys are few enough to pass through L2 without clearing it
    folio_u32 boxes_log2;
    folio_u32 k_page_step, v_page_step;  // pages in units of the coordinate that counts them
    folio_u32 pages_by_head;  // that is the last coordinate, of KV heads (HND); else the fourth, of 8 tokens (NHD)
    folio_u32 reserved;
};

// src/problem/attention.rs: Sum. What rows came to over other keys, to which a run adds; `o` may be the run's output, `lse`
// its lse, in the base of the run's. Compact: [token][head][column] and [token][head].
struct FolioSum {
    const float *o;  // null: there is none
    float *lse;      // -inf: o is not read
};

// kernels/plan/combine.cu: puts the parts of FolioPlanView::combines together.
struct FolioCombineParams {
    FolioPlanView plan;
    FolioRows o;
    float *lse;
    folio_i64 lse_stride_token, lse_stride_head;
    const float *sinks;
    const float *v_scales;
    float v_scale, o_scale;
    folio_i32 v_scales_stride;
    folio_u32 flags;  // FolioRunFlag
    folio_u32 num_qo_heads, group_size, head_dim_vo, o_dtype;
    folio_u32 blocks_of_row;  // CTAs per combine item: they share the heads
    folio_u32 num_tokens;     // FolioAttentionParams::num_tokens
    FolioSum sum;
};

// kernels/ops/merge.cu: n attention states per row; the public merges of two and of n.
struct FolioState {
    const void *v;
    const float *s;
    folio_i64 v_stride_token, v_stride_state, v_stride_head, s_stride_token, s_stride_state, s_stride_head;
};

struct FolioMergeStatesParams {
    FolioState first, second;  // two states of one each, or n of `first` when second.v is null (n is not 2)
    FolioRows v_out;
    float *s_out;  // or null
    folio_i64 s_out_stride_token, s_out_stride_head;
    const unsigned char *mask;  // [num_tokens], a zero leaves the row as it is; or null
    folio_i64 mask_stride;
    folio_i64 num_tokens;
    FolioDivisor num_heads;
    folio_u32 num_states, head_dim;
    folio_u32 flags;       // FolioRunFlag
    folio_u32 vectors;     // rows are 16-byte aligned and a multiple of 8 elements long
    folio_u32 log2_lanes;  // lanes of a row: up to 32
};

// kernels/ops/append.cu: new tokens into a paged cache, keys and values in one launch.
struct FolioAppendTensor {
    FolioRows source;
    FolioCache cache;
    const float *scales;  // [num_kv_heads] with stride scales_stride, or null
    float scale;
    folio_i32 scales_stride;
    folio_u32 head_dim;
    FolioDivisor pieces;  // vectors (or elements) per head
};

struct FolioAppendParams {
    FolioAppendTensor k, v;
    const void *slots;
    folio_i64 num_tokens, num_slots;
    FolioDivisor page_size;
    folio_u32 slot_bytes, num_kv_heads;
    folio_u32 vectors;  // rows are 16-byte aligned and a multiple of 8 elements long
};

// The numbers of src/cuda/params.rs.
static_assert(sizeof(FolioWorkItem) == 48 && sizeof(FolioCombineItem) == 16, "plan records");
static_assert(sizeof(FolioPlanView) == 80 && sizeof(FolioAttentionParams) == 376, "attention");
static_assert(sizeof(FolioGenericParams) == 520 && sizeof(FolioCombineParams) == 200, "generic kernels");
static_assert(sizeof(FolioScoreBias) == 64, "biases");
static_assert(sizeof(FolioDecodeParams) == 408, "Hopper decode");
static_assert(sizeof(FolioMergeStatesParams) == 232, "merges");
static_assert(sizeof(FolioAppendTensor) == 88 && sizeof(FolioAppendParams) == 224, "append");
