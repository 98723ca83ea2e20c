//! What the operators on a paged cache are given.

use super::{CacheFormat, Checked, KvLayout};
use crate::dtype::DType;
use crate::tensor::Tensor;

/// New tokens for a paged cache (`reshape_and_cache` in vLLM, `append_paged_kv_cache` in FlashInfer).
#[derive(Debug, Clone, Copy)]
pub struct AppendArgs {
    /// `[num_tokens or more, num_kv_heads, head_dim_qk]`.
    pub key: Tensor,
    /// `[num_tokens or more, num_kv_heads, head_dim_vo]`.
    pub value: Tensor,
    /// A paged cache in `layout`, or without the page dimension where a page holds one token. Checked:
    /// `[num_pages, page_size, num_kv_heads, head_dim_qk]` whatever the layout.
    pub k_cache: Tensor,
    /// As `k_cache`, with `head_dim_vo`.
    pub v_cache: Tensor,
    /// Dimension order of the caches as they are stated.
    pub layout: KvLayout,
    /// Type that caches of plain bytes hold; `None` where the tensors say it themselves.
    pub kv_dtype: Option<DType>,
    /// `[num_tokens]` int32 or int64: `page · page_size + offset`; negative slots are skipped.
    pub slot_mapping: Tensor,
    /// An fp8 cache holds `x / (k_scale · k_scales[head])`; 0 means 1. Checked: never 0.
    pub k_scale: f32,
    /// As `k_scale`, for values.
    pub v_scale: f32,
    /// fp32, 1 or `num_kv_heads` elements.
    pub k_scales: Option<Tensor>,
    /// fp32, 1 or `num_kv_heads` elements.
    pub v_scales: Option<Tensor>,
}

impl Checked<AppendArgs> {
    /// How rows of the caches are stored.
    pub fn format(&self) -> CacheFormat {
        CacheFormat::plain(self.k_cache.dtype())
    }
}
