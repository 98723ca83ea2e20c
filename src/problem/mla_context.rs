//! Multi-head latent attention of new tokens in its multi-head form, over themselves and over a cached context that is
//! unpacked chunk by chunk.
//!
//! Names of extents: `T` new tokens, `H` heads, `L` latent width, `P` nope width of a query or key head, `R` rotary width,
//! `V` width of a value head.

use super::{CacheFormat, LatentCache, LogBase};
use crate::dtype::DType;
use crate::tensor::Tensor;

/// What picks code and bounds memory. Fixed at create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaContextDesc {
    /// Type of q, k, v, o and the weights: fp32, fp16 or bf16.
    pub dtype: DType,
    /// How records are stored.
    pub cache: CacheFormat,
    /// `H`.
    pub num_heads: u32,
    /// `L`.
    pub kv_lora_rank: u32,
    /// `P`.
    pub qk_nope_head_dim: u32,
    /// `R`.
    pub qk_rope_head_dim: u32,
    /// `V`.
    pub v_head_dim: u32,
    /// Tokens per page.
    pub page_size: u32,
    /// Most requests in a batch.
    pub max_batch_size: u32,
    /// Most new tokens of one request.
    pub max_qo_len: u32,
    /// Most new tokens of a batch.
    pub max_num_tokens: u32,
    /// Most tokens of one request, those of this step included.
    pub max_kv_len: u32,
    /// Most page-table entries of a batch.
    pub max_num_pages: u64,
    /// Most context tokens that are unpacked at a time; 0: as many as vLLM (`plan::default_chunk_tokens`).
    pub max_chunk_tokens: u32,
    /// The caller unpacks records itself, between the steps of a run.
    pub in_steps: bool,
    /// Runs may be captured in a CUDA graph and planned again for the same graph.
    pub graph: bool,
}

/// The weights of the up-projection.
#[derive(Debug, Clone, Copy)]
pub struct UpProjection {
    /// `[H, P, L]`.
    pub w_uk: Tensor,
    /// `[H, L, V]`.
    pub w_uv: Tensor,
}

/// The caller's memory for a chunk, where it unpacks records itself. Each has a row per token of the chunk, or more.
#[derive(Debug, Clone, Copy)]
pub struct ChunkRows {
    /// Written by gather: `[rows, L]`.
    pub latent: Tensor,
    /// Written by gather, read by attend: `[rows, R]`.
    pub rope: Tensor,
    /// Read by attend: `[rows, H, P]`.
    pub k_nope: Tensor,
    /// Read by attend: `[rows, H, V]`.
    pub v: Tensor,
}

/// Where keys and values of a chunk come from.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::large_enum_variant, reason = "lives on the stack for one call")]
pub enum Unpacking {
    /// Folio multiplies latent rows with these.
    Weights(UpProjection),
    /// The caller writes them between the steps.
    Caller(ChunkRows),
}

/// Everything that may differ between the layers that share a plan.
#[derive(Debug, Clone, Copy)]
pub struct MlaContextArgs {
    /// `[T or more, H, P + R]`.
    pub q: Tensor,
    /// `[T or more, H, P]`.
    pub k_nope: Tensor,
    /// `[T or more, R]`, or with a dimension of one head in the middle.
    pub k_rope: Tensor,
    /// `[T or more, H, V]`.
    pub v: Tensor,
    /// The records of the context, and of whatever else.
    pub cache: LatentCache,
    /// How records become keys and values.
    pub unpacking: Unpacking,
    /// `[T or more, H, V]`.
    pub o: Tensor,
    /// `[T or more, H]` fp32.
    pub lse: Option<Tensor>,
    /// Base of `lse`.
    pub lse_base: LogBase,
    /// Factor on q·k; 0 means `1 / sqrt(P + R)`.
    pub sm_scale: f32,
    /// What values of a plain fp8 cache are multiplied by; 0 means 1.
    pub k_scale: f32,
}
