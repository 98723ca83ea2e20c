//! The arguments of a run: what may change from layer to layer.

use super::sized::{Input, reserved};
use super::tensor::{folio_tensor, log_base, required, tensor};
use crate::error::{Error, Result};
use crate::problem::{AttentionArgs, AttentionChunks, Mask, MaskColumns, ScoreBias, Window};
use crate::tensor::Tensor;
use std::num::NonZeroU32;

/// window_left and window_right are in force. Without the flag both must be 0 (or -1).
pub const FOLIO_RUN_WINDOW: u32 = 1;
/// lse is in base 2 (FlashInfer's) instead of base e. Without lse it has no effect.
pub const FOLIO_RUN_LSE_BASE_2: u32 = 2;
/// alibi_slopes take the square-root form.
pub const FOLIO_RUN_ALIBI_SQRT: u32 = 4;

/// Columns of custom_mask before a request's last qo_len keys are not read: every row sees those keys. It is SGLang's
/// skip_prefix_custom_mask.
pub const FOLIO_RUN_MASK_SKIP_PREFIX: u32 = 8;
/// custom_mask has columns for a request's last qo_len keys only, `[qo_len, qo_len]` per request: every row sees the keys
/// before them. Needs custom_mask_indptr.
pub const FOLIO_RUN_MASK_NEW_KEYS: u32 = 16;
/// Window and chunks hold inside mm_prefix_ranges too.
pub const FOLIO_RUN_MM_PREFIX_IN_WINDOW: u32 = 32;
/// Columns of score_bias are a request's last qo_len keys; those before them get nothing. With
/// FOLIO_RUN_BIAS_REQUEST_ROWS and a tensor of rank 2 it is vLLM's qq_bias. Needs score_bias.
pub const FOLIO_RUN_BIAS_NEW_KEYS: u32 = 64;
/// Rows of score_bias count within a request, so that all requests share them; without the flag they are the rows of q.
/// Needs score_bias.
pub const FOLIO_RUN_BIAS_REQUEST_ROWS: u32 = 128;

/// Row i of a request sees key j iff j <= kv_len - qo_len + i: the last row sees the last key.
pub const FOLIO_MASK_CAUSAL: i32 = 0;
/// Every row sees every key: encoders, cross attention.
pub const FOLIO_MASK_FULL: i32 = 1;
/// custom_mask holds a byte (uint8 or bool) per (row, key), row-major `[qo_len, kv_len]` per request, the
/// requests one after the other; non-zero lets see.
pub const FOLIO_MASK_CUSTOM_BYTES: i32 = 2;
/// custom_mask holds a bit per (row, key), little-endian in each byte; each request starts on a byte. It is
/// FlashInfer's packed custom mask.
pub const FOLIO_MASK_CUSTOM_BITS: i32 = 3;
/// Requests whose element of causal_requests is not 0 are causal, the others full.
pub const FOLIO_MASK_CAUSAL_BY_REQUEST: i32 = 4;
/// Multi-item scoring (FlashInfer): the keys before item_starts are a prefix, the others items one after the other. The row at
/// position p sees key j iff `j <= p && (j < item_starts[request] || p - j <= item_positions[request, p - item_starts])`.
/// On CUDA devices it is for handles with FOLIO_PLAN_MASK_ITEMS.
pub const FOLIO_MASK_ITEMS: i32 = 5;

/// Tensors and parameters of one attention call; one plan serves many, with different values.
///
/// For query row i (position p = kv_len - qo_len + i) and key j:
///
/// ```text
/// s = cap(q·k · sm_scale · q_scale · q_scales[kv_head] · k_scale · k_scales[kv_head]) + alibi(j - p) + score_bias[row, j]
/// around(p, j) = p - j <= window_left and j - p <= window_right and chunk(p) - chunk(j) <= attention_chunk_look_back
/// seen iff (mask(i, j) and around(p, j)) or mm_prefix(p, j)
/// o = Σ softmax(s)_j v_j · v_scale · v_scales[kv_head],  divided by o_scale · o_scales[0] and saturated for fp8
/// lse = log(Σ e^s [+ e^sink])
/// ```
///
/// with chunk(x) = floor(x / attention_chunk_size), and cap(s) = logits_soft_cap · tanh(s / logits_soft_cap), and a sink as one more logit without a
/// value. A row that sees nothing has o = 0 and lse = -inf (its sink, with sinks). Memory that no row sees may
/// hold anything, NaN included.
///
/// The rules are those of FlashInfer's, vLLM's and SGLang's attention backends, with their differences
/// resolved. Soft caps are Gemma 2's, ALiBi that of Press et al. (2022), its square-root form and the prefix
/// ranges vLLM's, as is the bias of new keys, chunks those of Llama 4's local attention, sinks those of gpt-oss, the lse of parts that of FlashAttention-2.
///
/// A scale or factor of 0 stands for its default, so 0 itself cannot be said.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_attention_args {
    /// sizeof(folio_attention_args).
    pub struct_size: u32,
    /// FOLIO_RUN_…
    pub flags: u32,
    /// Queries: `[num_tokens or more, num_qo_heads, head_dim_qk]` of q_dtype.
    pub q: *const folio_tensor,
    /// Keys: paged `[num_pages, page_size, num_kv_heads, head_dim_qk]` (NHD), `[num_pages, num_kv_heads,
    /// page_size, head_dim_qk]` (HND), `[num_slots, num_kv_heads, head_dim_qk]` (page_size 1); ragged
    /// `[nnz_kv or more, num_kv_heads, head_dim_qk]`. Of kv_dtype; uint8 stands for fp8. num_pages is above
    /// every page id in use, and 1 or more where page ids or lengths are on a device. With k_rope, rows are shorter.
    pub k: *const folio_tensor,
    /// Values: as k, with head_dim_vo and strides of its own.
    pub v: *const folio_tensor,
    /// Output: `[num_tokens or more, num_qo_heads, head_dim_vo]` of o_dtype; uint8 stands for fp8. It may
    /// not overlap another tensor, q neither.
    pub o: *const folio_tensor,
    /// Output: `[num_tokens or more, num_qo_heads]` float32, float16 or bfloat16 of any strides, or NULL. It is computed in
    /// float32 and rounded once; what is beyond the type becomes infinite.
    pub lse: *const folio_tensor,
    /// `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or NULL: further factors of k, read by the run
    /// where it computes. Contiguous, but strides of 0 may expand one row, or one number, to the last of these shapes.
    /// Where the desc's kv_format has scales of its own: those, in the shape that FOLIO_KV_FORMAT_… says.
    pub k_scales: *const folio_tensor,
    /// As k_scales, for v.
    pub v_scales: *const folio_tensor,
    /// `[elements or more]` uint8 or bool, for the custom mask modes: as many bytes as the mode says for the
    /// batch. NULL otherwise.
    pub custom_mask: *const folio_tensor,
    /// `[batch_size, num_ranges, 2]` int32 or NULL: a row and a key at positions inside the same
    /// inclusive range see each other whatever mask and window say. start >= end: unused.
    pub mm_prefix_ranges: *const folio_tensor,
    /// `[num_qo_heads]` or `[batch_size, num_qo_heads]` float32, or NULL: adds slope · (j - p), or -slope · sqrt(p - j) for past keys.
    pub alibi_slopes: *const folio_tensor,
    /// `[num_qo_heads]` float32 or NULL: a logit per head, in base e, that no scale and no cap changes.
    pub sinks: *const folio_tensor,
    /// Factor of q·k. 0: 1 / sqrt(head_dim_qk). sm_scale · q_scale · k_scale is within ±2^60: beyond it
    /// logits leave float32.
    pub sm_scale: f32,
    /// Factor of q, which holds the queries divided by it. 0: 1.
    pub q_scale: f32,
    /// Factor of k, for all heads: an fp8 cache holds k / k_scale. 0: 1.
    pub k_scale: f32,
    /// Factor of v, for all heads, as k_scale; within ±2^60. 0: 1.
    pub v_scale: f32,
    /// Divisor of o, 2^-60 to 2^60; only for fp8 outputs. 0: 1.
    pub o_scale: f32,
    /// Logits are capped to ± this, 2^-60 to 2^60. 0: off.
    pub logits_soft_cap: f32,
    /// FOLIO_MASK_…
    pub mask_mode: i32,
    /// Keys before the row's own position that it sees; -1: unlimited. Needs FOLIO_RUN_WINDOW.
    pub window_left: i32,
    /// Keys after the row's own position that it sees; -1: unlimited. Needs FOLIO_RUN_WINDOW.
    pub window_right: i32,
    /// 0.
    pub reserved: u32,
    /// NULL where k has whole keys. Otherwise the last elements of the keys, in a tensor of one head that all KV heads
    /// share (the rotary part of DeepSeek-V2's MLA in its multi-head form): as k without the dimension of heads, or
    /// with one of extent 1, and with rope elements per row and strides of its own; of kv_dtype. k then has rows of
    /// head_dim_qk - rope elements, a multiple of 8. Paged `[num_pages, page_size, rope]` (both layouts),
    /// `[num_slots, rope]` (page_size 1); ragged `[nnz_kv or more, rope]`. Prefill handles only. Scales of k are of both
    /// parts.
    pub k_rope: *const folio_tensor,
    /// `[batch_size + 1]` int64, for the custom mask modes: where each request's mask starts in custom_mask, in bytes. The
    /// last element is not read, and neither are those of requests without rows. NULL: the masks lie one after the other.
    /// On a device, what a mask lacks is hidden.
    pub custom_mask_indptr: *const folio_tensor,
    /// `[batch_size]` uint8 or bool, for FOLIO_MASK_CAUSAL_BY_REQUEST. NULL otherwise.
    pub causal_requests: *const folio_tensor,
    /// Keys of a chunk of chunked local attention; 0: off. Chunks count from a request's first key.
    pub attention_chunk_size: u32,
    /// Chunks before its own that a row sees.
    pub attention_chunk_look_back: u32,
    /// `[num_kv_heads, head_dim_qk]` float32, for FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS. NULL otherwise.
    pub k_zero_points: *const folio_tensor,
    /// `[num_kv_heads, head_dim_vo]` float32, for FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS. NULL otherwise.
    pub v_zero_points: *const folio_tensor,
    /// Where a prefill desc has a new_kv_dtype, else NULL: the keys of the query rows, `[num_tokens or more, num_kv_heads,
    /// head_dim_qk]` of that type, in the order of the rows; any strides but a unit last one. They follow the request's
    /// keys in the cache, which are all that the batch's lengths and page table tell of, and kv_len above counts both. So
    /// positions, masks with their columns, windows, chunks, ranges and biases are those of a cache that had the new keys at
    /// the end. k_scale, v_scale, k_scales, v_scales and zero points are the cache's: new keys and values are as they are.
    /// Not with k_rope.
    pub k_new: *const folio_tensor,
    /// As k_new, for values: `[num_tokens or more, num_kv_heads, head_dim_vo]`.
    pub v_new: *const folio_tensor,
    /// `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]` float32, or NULL: further factors of q, as k_scales. On a
    /// device they are read when the run gets there, so they may change under a captured graph, as k_scales and v_scales
    /// may. On CUDA this field and o_scales cost one more small launch. No number is checked.
    pub q_scales: *const folio_tensor,
    /// `[1]` float32, or NULL: a further divisor of o; only for fp8 outputs. As q_scales.
    pub o_scales: *const folio_tensor,
    /// `[batch_size]` int64, for FOLIO_MASK_ITEMS: the key that a request's first item begins with (FlashInfer's prefix_len_ptr).
    /// NULL otherwise.
    pub item_starts: *const folio_tensor,
    /// `[batch_size, columns]` int32, for FOLIO_MASK_ITEMS: the positions within their items of the tokens from item_starts on,
    /// the delimiter before an item at 0 (FlashInfer's token_pos_in_items_ptr). A row without a column sees the prefix
    /// alone. NULL otherwise.
    pub item_positions: *const folio_tensor,
    /// `[rows, columns]` for all heads or `[num_qo_heads or 1, rows, columns]`, float32, float16 or bfloat16 of any strides,
    /// or NULL: adds its elements to the logits of keys that a row sees, after the cap and beside ALiBi, in base e. Rows are
    /// those of q, or with FOLIO_RUN_BIAS_REQUEST_ROWS a request's; columns are a request's keys, or with
    /// FOLIO_RUN_BIAS_NEW_KEYS its last qo_len ones. There are as many as the batch has, or more, in each dimension; of lengths on
    /// a device, what the tensor lacks adds nothing. -inf hides a key. Elements of keys that a row does not see
    /// may be anything. Others may be neither NaN nor +inf, which give NaN.
    pub score_bias: *const folio_tensor,
}

const _: () = assert!(size_of::<folio_attention_args>() == 240);

// SAFETY: repr(C), two u32 first, numbers and pointers only, no padding (asserted by size).
unsafe impl Input for folio_attention_args {
    const NAME: &'static str = "folio_attention_args";
    const FIRST_SIZE: usize = 136;
    const FLAGS: u32 = FOLIO_RUN_WINDOW
        | FOLIO_RUN_LSE_BASE_2
        | FOLIO_RUN_ALIBI_SQRT
        | FOLIO_RUN_MASK_SKIP_PREFIX
        | FOLIO_RUN_MASK_NEW_KEYS
        | FOLIO_RUN_MM_PREFIX_IN_WINDOW
        | FOLIO_RUN_BIAS_NEW_KEYS
        | FOLIO_RUN_BIAS_REQUEST_ROWS;
    type Parsed = AttentionArgs;

    unsafe fn parse(&self) -> Result<AttentionArgs> {
        reserved("folio_attention_args.reserved", self.reserved)?;
        // SAFETY: the caller's promise.
        unsafe {
            Ok(AttentionArgs {
                q: required("q", self.q)?,
                q_rope: None,
                k: required("k", self.k)?,
                k_rope: tensor("k_rope", self.k_rope)?,
                v: required("v", self.v)?,
                o: required("o", self.o)?,
                lse: tensor("lse", self.lse)?,
                lse_base: log_base(self.flags & FOLIO_RUN_LSE_BASE_2),
                sm_scale: self.sm_scale,
                q_scale: self.q_scale,
                k_scale: self.k_scale,
                v_scale: self.v_scale,
                o_scale: self.o_scale,
                q_scales: tensor("q_scales", self.q_scales)?,
                k_scales: tensor("k_scales", self.k_scales)?,
                k_zero_points: tensor("k_zero_points", self.k_zero_points)?,
                v_scales: tensor("v_scales", self.v_scales)?,
                v_zero_points: tensor("v_zero_points", self.v_zero_points)?,
                o_scales: tensor("o_scales", self.o_scales)?,
                logits_soft_cap: self.logits_soft_cap,
                mask: mask(
                    self.mask_mode,
                    tensor("custom_mask", self.custom_mask)?,
                    tensor("causal_requests", self.causal_requests)?,
                    [
                        tensor("item_starts", self.item_starts)?,
                        tensor("item_positions", self.item_positions)?,
                    ],
                )?,
                custom_mask_indptr: tensor("custom_mask_indptr", self.custom_mask_indptr)?,
                mask_columns: self.mask_columns()?,
                window: self.window()?,
                chunks: self.chunks()?,
                mm_prefix_ranges: tensor("mm_prefix_ranges", self.mm_prefix_ranges)?,
                mm_prefix_in_window: self.flags & FOLIO_RUN_MM_PREFIX_IN_WINDOW != 0,
                alibi_slopes: tensor("alibi_slopes", self.alibi_slopes)?,
                alibi_sqrt: self.flags & FOLIO_RUN_ALIBI_SQRT != 0,
                score_bias: self.bias(tensor("score_bias", self.score_bias)?)?,
                sinks: tensor("sinks", self.sinks)?,
                k_new: tensor("k_new", self.k_new)?,
                v_new: tensor("v_new", self.v_new)?,
            })
        }
    }
}

impl folio_attention_args {
    fn window(&self) -> Result<Window> {
        if self.flags & FOLIO_RUN_WINDOW != 0 {
            return Ok(Window {
                left: window_side("window_left", self.window_left)?,
                right: window_side("window_right", self.window_right)?,
            });
        }
        for (name, value) in [
            ("window_left", self.window_left),
            ("window_right", self.window_right),
        ] {
            if value != 0 && value != -1 {
                return Err(Error::InvalidArgument(format!(
                    "{name}: {value} is not accepted without FOLIO_RUN_WINDOW in flags; 0 or -1 is"
                )));
            }
        }
        Ok(Window::default())
    }

    fn mask_columns(&self) -> Result<MaskColumns> {
        const BOTH: u32 = FOLIO_RUN_MASK_SKIP_PREFIX | FOLIO_RUN_MASK_NEW_KEYS;
        match self.flags & BOTH {
            0 => Ok(MaskColumns::Keys),
            FOLIO_RUN_MASK_SKIP_PREFIX => Ok(MaskColumns::KeysAfterPrefix),
            FOLIO_RUN_MASK_NEW_KEYS => Ok(MaskColumns::NewKeys),
            _ => Err(Error::InvalidArgument(
                "flags: FOLIO_RUN_MASK_SKIP_PREFIX with FOLIO_RUN_MASK_NEW_KEYS is not accepted; one of them is".into(),
            )),
        }
    }

    fn bias(&self, tensor: Option<Tensor>) -> Result<Option<ScoreBias>> {
        const ROWS_AND_COLUMNS: u32 = FOLIO_RUN_BIAS_NEW_KEYS | FOLIO_RUN_BIAS_REQUEST_ROWS;
        match tensor {
            Some(tensor) => Ok(Some(ScoreBias {
                tensor,
                request_rows: self.flags & FOLIO_RUN_BIAS_REQUEST_ROWS != 0,
                new_keys: self.flags & FOLIO_RUN_BIAS_NEW_KEYS != 0,
            })),
            None if self.flags & ROWS_AND_COLUMNS == 0 => Ok(None),
            None => Err(Error::InvalidArgument(
                "flags: BIAS_NEW_KEYS or BIAS_REQUEST_ROWS is not accepted without score_bias"
                    .into(),
            )),
        }
    }

    fn chunks(&self) -> Result<Option<AttentionChunks>> {
        let look_back = self.attention_chunk_look_back;
        match NonZeroU32::new(self.attention_chunk_size) {
            Some(size) => Ok(Some(AttentionChunks { size, look_back })),
            None if look_back == 0 => Ok(None),
            None => Err(Error::InvalidArgument(format!(
                "attention_chunk_look_back: {look_back} is not accepted without attention_chunk_size; 0 is"
            ))),
        }
    }
}

fn window_side(name: &str, value: i32) -> Result<Option<u32>> {
    match value {
        -1 => Ok(None),
        0.. => Ok(Some(value as u32)),
        _ => Err(Error::InvalidArgument(format!(
            "{name}: {value} is not accepted; -1 (unlimited) or more is"
        ))),
    }
}

/// A tensor that comes with one mode and with no other.
fn check_presence(name: &str, tensor: Option<Tensor>, mode: i32, of_mode: i32) -> Result<()> {
    let (given, accepted) = match (mode == of_mode, tensor.is_some()) {
        (true, false) => ("NULL", "a tensor"),
        (false, true) => ("a tensor", "NULL"),
        _ => return Ok(()),
    };
    Err(Error::InvalidArgument(format!(
        "{name}: {given} is not accepted with mask_mode {mode}; {accepted} is"
    )))
}

fn mask(
    mode: i32,
    custom_mask: Option<Tensor>,
    causal_requests: Option<Tensor>,
    [starts, positions]: [Option<Tensor>; 2],
) -> Result<Mask> {
    for (name, tensor, of_mode) in [
        (
            "causal_requests",
            causal_requests,
            FOLIO_MASK_CAUSAL_BY_REQUEST,
        ),
        ("item_starts", starts, FOLIO_MASK_ITEMS),
        ("item_positions", positions, FOLIO_MASK_ITEMS),
    ] {
        check_presence(name, tensor, mode, of_mode)?;
    }
    if let (Some(starts), Some(positions), None) = (starts, positions, custom_mask) {
        return Ok(Mask::Items { starts, positions });
    }
    match (mode, custom_mask) {
        (FOLIO_MASK_CAUSAL_BY_REQUEST, None) => {
            Ok(causal_requests.map_or(Mask::Causal, Mask::CausalByRequest))
        }
        (FOLIO_MASK_CAUSAL, None) => Ok(Mask::Causal),
        (FOLIO_MASK_FULL, None) => Ok(Mask::Full),
        (FOLIO_MASK_CUSTOM_BYTES, Some(mask)) => Ok(Mask::Bytes(mask)),
        (FOLIO_MASK_CUSTOM_BITS, Some(mask)) => Ok(Mask::Bits(mask)),
        (
            FOLIO_MASK_CAUSAL | FOLIO_MASK_FULL | FOLIO_MASK_CAUSAL_BY_REQUEST | FOLIO_MASK_ITEMS,
            Some(_),
        ) => Err(Error::InvalidArgument(format!(
            "custom_mask: a tensor is not accepted with mask_mode {mode}; NULL is"
        ))),
        (FOLIO_MASK_CUSTOM_BYTES | FOLIO_MASK_CUSTOM_BITS, None) => Err(Error::InvalidArgument(
            format!("custom_mask: NULL is not accepted with mask_mode {mode}; a tensor is"),
        )),
        _ => Err(Error::InvalidArgument(format!(
            "mask_mode: {mode} is not accepted; FOLIO_MASK_CAUSAL (0) to FOLIO_MASK_ITEMS (5) is"
        ))),
    }
}
