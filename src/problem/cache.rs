//! The small operators around attention: writing new tokens to a paged cache, and merging attention
//! states.

use super::LogBase;
use crate::tensor::Tensor;

/// New tokens for a paged cache (`reshape_and_cache` in vLLM, `append_paged_kv_cache` in FlashInfer).
#[derive(Debug, Clone, Copy)]
pub struct AppendArgs {
    /// `[num_tokens or more, num_kv_heads, head_dim_qk]`.
    pub key: Tensor,
    /// `[num_tokens or more, num_kv_heads, head_dim_vo]`.
    pub value: Tensor,
    /// `[num_pages, page_size, num_kv_heads, head_dim_qk]`, whatever the layout.
    pub k_cache: Tensor,
    /// `[num_pages, page_size, num_kv_heads, head_dim_vo]`, whatever the layout.
    pub v_cache: Tensor,
    /// `[num_tokens]` int32 or int64: `page · page_size + offset`; negative slots are skipped.
    pub slot_mapping: Tensor,
    /// An fp8 cache holds `x / (k_scale · k_scales[head])`.
    pub k_scale: f32,
    /// As `k_scale`, for values.
    pub v_scale: f32,
    /// fp32, 1 or `num_kv_heads` elements.
    pub k_scales: Option<Tensor>,
    /// fp32, 1 or `num_kv_heads` elements.
    pub v_scales: Option<Tensor>,
}

/// Two attention states to be merged, row by row.
#[derive(Debug, Clone, Copy)]
pub struct MergeArgs {
    /// `[num_tokens, num_heads, head_dim]`.
    pub v_a: Tensor,
    /// `[num_tokens, num_heads]` fp32.
    pub s_a: Tensor,
    /// As `v_a`.
    pub v_b: Tensor,
    /// As `s_a`.
    pub s_b: Tensor,
    /// Merged outputs; may be `v_a` or `v_b` themselves.
    pub v_out: Tensor,
    /// Merged lse; may be `s_a` or `s_b` themselves.
    pub s_out: Option<Tensor>,
    /// `[num_tokens]` bytes; a zero leaves the row of the outputs as it is.
    pub mask: Option<Tensor>,
    /// Base of all three lse.
    pub lse_base: LogBase,
}

/// `n` attention states per row to be merged.
#[derive(Debug, Clone, Copy)]
pub struct MergeStatesArgs {
    /// `[num_tokens, n, num_heads, head_dim]`.
    pub v: Tensor,
    /// `[num_tokens, n, num_heads]` fp32.
    pub s: Tensor,
    /// `[num_tokens, num_heads, head_dim]`.
    pub v_out: Tensor,
    /// `[num_tokens, num_heads]` fp32.
    pub s_out: Option<Tensor>,
    /// Base of all lse.
    pub lse_base: LogBase,
}
