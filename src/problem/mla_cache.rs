//! What the operators on a cache of latent records (MLA) are given: writing records, and reading them back.

use crate::dtype::DType;
use crate::tensor::Tensor;

/// A cache with one record per token as a caller states it: `rank` latent elements, and then `rope_dim` rotary ones.
#[derive(Debug, Clone, Copy)]
pub struct LatentCache {
    /// Records: `[num_pages, page_size, rank + rope_dim]`; with `kv_rope`: `[num_pages, page_size, rank]`;
    /// `fp8_ds_mla`: bytes, `[num_pages, page_size, 656]`.
    pub kv: Tensor,
    /// `[num_pages, page_size, rope_dim]`, where the rotary elements have a tensor of their own.
    pub kv_rope: Option<Tensor>,
    /// Type that tensors of plain bytes hold; `None` where the tensors say it themselves.
    pub kv_dtype: Option<DType>,
    /// Whether records are those of `CacheFormat::DS_MLA`.
    pub is_ds_mla: bool,
}

/// The parts of a checked cache's records. Each is a tensor, wherever the parts lie in memory.
#[derive(Debug, Clone, Copy)]
pub struct LatentRecords {
    /// `[num_pages, page_size, rank]`. Where nothing tells the two apart, the rotary elements are among these.
    pub latent: Tensor,
    /// `fp8_ds_mla`: fp32 `[num_pages, page_size, rank / 128]`.
    pub scales: Option<Tensor>,
    /// `[num_pages, page_size, rope_dim]`.
    pub rope: Option<Tensor>,
}

/// Latent elements that one scale of an `fp8_ds_mla` record covers.
pub const DS_MLA_BLOCK: usize = 128;

/// New tokens for a cache of latent records (`concat_and_cache_mla` in vLLM). `Cache` is [`LatentCache`], and
/// [`LatentRecords`] when it has been checked.
#[derive(Debug, Clone, Copy)]
pub struct MlaAppendArgs<Cache = LatentCache> {
    /// `[num_tokens or more, rank]`, or with a dimension of one in the middle. Checked: without.
    pub latent: Tensor,
    /// `[num_tokens or more, rope_dim]`, as `latent`.
    pub rope: Option<Tensor>,
    /// Where they go.
    pub cache: Cache,
    /// `[num_tokens]` int32 or int64: `page · page_size + offset`; negative slots are skipped.
    pub slot_mapping: Tensor,
    /// A plain fp8 cache holds `x / k_scale`; 0 means 1. Checked: never 0.
    pub k_scale: f32,
    /// Rotary elements are rotated before they are stored.
    pub rotary: Option<Rotary>,
}

/// Rotary embedding of new tokens: `rope`, and queries beside it.
#[derive(Debug, Clone, Copy)]
pub struct Rotary {
    /// `[max_position, rope_dim]`: the cosines of a position, one for each pair, and then the sines. fp32 or the type
    /// of the tokens.
    pub cos_sin_cache: Tensor,
    /// `[num_tokens]` int32 or int64.
    pub positions: Tensor,
    /// Pairs are neighbours (GPT-J, DeepSeek), not an element of either half (GPT-NeoX).
    pub is_interleaved: bool,
    /// Output: rotated `rope`, `[num_tokens or more, rope_dim]`.
    pub rope_out: Option<Tensor>,
    /// `[num_tokens or more, num_heads, rope_dim]`: rotated too.
    pub q_rope: Option<Tensor>,
    /// Output: rotated `q_rope`, which it may be itself. Checked: there iff `q_rope` is.
    pub q_rope_out: Option<Tensor>,
}

/// Records to be copied from a cache to dense rows, and converted (`gather_and_maybe_dequant_cache` in vLLM). `Cache`
/// as in [`MlaAppendArgs`].
#[derive(Debug, Clone, Copy)]
pub struct MlaGatherArgs<Cache = LatentCache> {
    /// Where they come from.
    pub cache: Cache,
    /// `[num_rows, rank + rope_dim]`, or `[num_rows, rank]` with `dst_rope`. fp32, fp16 or bf16. Checked: as wide as
    /// the latent part of the records.
    pub dst: Tensor,
    /// `[num_rows, rope_dim]`. Checked: there iff the records have a rotary part.
    pub dst_rope: Option<Tensor>,
    /// `[batch_size + 1]` int32 or int64, as all of these: request `b` gets the rows from `cu_seq_lens[b]` to `cu_seq_lens[b + 1]`.
    pub cu_seq_lens: Tensor,
    /// `[batch_size]`: the token of each request that its first row holds; `None`: 0.
    pub seq_starts: Option<Tensor>,
    /// Where the tokens of a request are.
    pub pages: RecordPages,
    /// Values of a plain fp8 cache are multiplied by it; 0 means 1. Checked: never 0.
    pub k_scale: f32,
}

/// Page ids of requests.
#[derive(Debug, Clone, Copy)]
pub enum RecordPages {
    /// `[batch_size, columns]` int32 or int64; rows may be strided.
    Table(Tensor),
    /// Those of request `b` begin at `indices[indptr[b]]`.
    Csr {
        /// `[batch_size + 1]` int32 or int64.
        indptr: Tensor,
        /// `[n]` int32 or int64.
        indices: Tensor,
    },
}
