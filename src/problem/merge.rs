//! What the merges of attention states are given.

use super::LogBase;
use crate::tensor::Tensor;

/// Two attention states to be merged, row by row.
#[derive(Debug, Clone, Copy)]
pub struct MergeArgs {
    /// `[num_tokens, num_heads, head_dim]`.
    pub v_a: Tensor,
    /// `[num_tokens, num_heads]` fp32, fp16 or bf16.
    pub s_a: Tensor,
    /// As `v_a`.
    pub v_b: Tensor,
    /// As `s_a`.
    pub s_b: Tensor,
    /// Merged outputs, of the states' type or fp8; may be `v_a` or `v_b` themselves.
    pub v_out: Tensor,
    /// Merged lse, fp32, fp16 or bf16; may be `s_a` or `s_b` themselves.
    pub s_out: Option<Tensor>,
    /// `[num_tokens]` bytes; a zero leaves the row of the outputs as it is.
    pub mask: Option<Tensor>,
    /// Base of all three lse.
    pub lse_base: LogBase,
    /// The last so many tokens have no state a, and nothing of it is read. Checked: at most `num_tokens`.
    pub num_tokens_without_a: i64,
    /// Divisor of an fp8 output. Checked: 2^-60 to 2^60, and 1 for any other output.
    pub o_scale: f32,
}

impl MergeArgs {
    /// Tokens that have both states; the others follow them.
    pub fn num_tokens_with_a(&self) -> i64 {
        self.v_out.extent(0) - self.num_tokens_without_a
    }
}

/// `n` attention states per row to be merged.
#[derive(Debug, Clone, Copy)]
pub struct MergeStatesArgs {
    /// `[num_tokens, n, num_heads, head_dim]`.
    pub v: Tensor,
    /// `[num_tokens, n, num_heads]` fp32, fp16 or bf16.
    pub s: Tensor,
    /// `[num_tokens, num_heads, head_dim]`, of the states' type or fp8.
    pub v_out: Tensor,
    /// `[num_tokens, num_heads]` fp32, fp16 or bf16, whatever the type of `s`.
    pub s_out: Option<Tensor>,
    /// Base of all lse.
    pub lse_base: LogBase,
    /// As in [`MergeArgs`].
    pub o_scale: f32,
}

/// A number of attention states for each token to be merged, one token's after another's.
#[derive(Debug, Clone, Copy)]
pub struct MergeVarlenArgs {
    /// `[num_states, num_heads, head_dim]`.
    pub v: Tensor,
    /// `[num_states, num_heads]` fp32, fp16 or bf16.
    pub s: Tensor,
    /// `[num_tokens + 1]` int32: token t has the states `indptr[t]..indptr[t + 1]`. Checked: compact; on the host the
    /// numbers rise and end within `v`.
    pub indptr: Tensor,
    /// `[num_tokens, num_heads, head_dim]`, of the states' type or fp8.
    pub v_out: Tensor,
    /// `[num_tokens, num_heads]` fp32, fp16 or bf16, whatever the type of `s`.
    pub s_out: Option<Tensor>,
    /// Base of all lse.
    pub lse_base: LogBase,
    /// As in [`MergeArgs`].
    pub o_scale: f32,
}
