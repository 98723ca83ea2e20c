//! What the operators of decode context parallelism are given: every rank holds a part of each sequence's keys.

use super::LogBase;
use crate::tensor::Tensor;

/// Records of a chunk of every context, gathered from all ranks rank by rank, to be put request by request.
#[derive(Debug, Clone, Copy)]
pub struct CpReorderArgs {
    /// `[world_size, rank_rows, width]`: what each rank gathered, as many rows of each.
    pub gathered: Tensor,
    /// `[num_rows, width]`: a request's rows of rank 0, then those of rank 1, and so on; not by their positions.
    pub dst: Tensor,
    /// `[batch_size]` int32: tokens of each context on all ranks.
    pub context_lens: Tensor,
    /// `[batch_size + 1]` int32: rows of `dst` before each request.
    pub cu_seq_lens: Tensor,
    /// `[batch_size + 1]` int32: rows of a rank before each request.
    pub cu_padded_lens: Tensor,
    /// Tokens of a rank before the chunk.
    pub local_start: u32,
    /// Tokens that are dealt to a rank at a time. Checked: never 0.
    pub interleave: u32,
}

/// One rank's output over its part of the keys, to be scaled so that those of all ranks add up to the output over all
/// keys.
#[derive(Debug, Clone, Copy)]
pub struct CpCorrectArgs {
    /// fp32 `[world_size, num_tokens, num_heads]`.
    pub lse_all: Tensor,
    /// Whose output it is, below `world_size`.
    pub rank: u32,
    /// `[num_tokens, num_heads, head_dim]`.
    pub o: Tensor,
    /// As `o`, which it may be itself.
    pub o_out: Tensor,
    /// fp32 `[num_tokens, num_heads]`: the lse over all keys.
    pub lse_out: Option<Tensor>,
    /// Base of all lse.
    pub lse_base: LogBase,
}
