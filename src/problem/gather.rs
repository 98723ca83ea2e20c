//! What copying a cache's tokens to dense rows is given.

use super::mla_cache::RecordPages;
use super::{CacheForm, CacheFormat, KvLayout, RowTensors};
use crate::dtype::DType;
use crate::tensor::Tensor;

/// Keys and values of requests to be copied from a paged cache to dense rows, and converted: what [`super::AppendArgs`]
/// wrote, read back.
#[derive(Debug, Clone, Copy)]
pub struct GatherArgs {
    /// `[num_rows, num_kv_heads, head_dim_qk]` fp32, fp16 or bf16.
    pub key: Tensor,
    /// `[num_rows, num_kv_heads, head_dim_vo]`, of the type of `key`.
    pub value: Tensor,
    /// A paged cache in `layout`, or without the page dimension where a page holds one token. Checked:
    /// `[num_pages, page_size, num_kv_heads, head_dim_qk]` whatever the layout.
    pub k_cache: Tensor,
    /// As `k_cache`, with `head_dim_vo`.
    pub v_cache: Tensor,
    /// Dimension order of the caches as they are stated.
    pub layout: KvLayout,
    /// The form of the caches' rows.
    pub form: CacheForm,
    /// Type that caches of plain bytes hold; `None` where the tensors say it themselves.
    pub kv_dtype: Option<DType>,
    /// Whose tokens the rows get.
    pub requests: GatheredRequests,
    /// Values of an fp8 cache are multiplied by `k_scale · k_scales[head]`; 0 means 1. Checked: never 0.
    pub k_scale: f32,
    /// As `k_scale`, for values.
    pub v_scale: f32,
    /// `None`, or fp32 of 1 or `num_kv_heads` elements; what [`RowTensors`] says for forms that have scales of their own.
    pub k_scales: Option<Tensor>,
    /// As `k_scales`, for values.
    pub v_scales: Option<Tensor>,
    /// As `k_scales` of [`CacheForm::ChannelZeroPoints`]; `None` for other forms.
    pub k_zero_points: Option<Tensor>,
    /// As `k_zero_points`, for values.
    pub v_zero_points: Option<Tensor>,
}

/// Tokens of requests, and the rows that they go to.
#[derive(Debug, Clone, Copy)]
pub struct GatheredRequests {
    /// `[batch_size + 1]` int32: request `b` gets the rows from `cu_seq_lens[b]` to `cu_seq_lens[b + 1]`.
    pub cu_seq_lens: Tensor,
    /// `[batch_size]` int32: the token of each request that its first row holds; `None`: 0.
    pub seq_starts: Option<Tensor>,
    /// Where the tokens of a request are.
    pub pages: RecordPages,
}

impl GatherArgs {
    /// How rows of the caches are stored.
    pub fn format(&self) -> CacheFormat {
        self.form.of(self.k_cache.dtype())
    }

    /// The caches of keys and of values.
    pub fn caches(&self) -> [RowTensors; 2] {
        RowTensors::of_both(
            self.format(),
            [self.k_cache, self.v_cache],
            [self.k_scales, self.v_scales],
            [self.k_zero_points, self.v_zero_points],
        )
    }
}
