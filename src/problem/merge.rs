//! What the merges of attention states are given.

use super::LogBase;
use crate::tensor::Tensor;

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
