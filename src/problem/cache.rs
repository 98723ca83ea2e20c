//! What the operators on a paged cache are given.

use super::{CacheForm, CacheFormat, KvLayout, RowTensors};
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
    /// The form of the caches' rows.
    pub form: CacheForm,
    /// Type that caches of plain bytes hold; `None` where the tensors say it themselves.
    pub kv_dtype: Option<DType>,
    /// `[num_tokens]` int32 or int64: `page · page_size + offset`; negative slots are skipped.
    pub slot_mapping: Tensor,
    /// An fp8 cache holds `x / (k_scale · k_scales[head])`; 0 means 1. Checked: never 0.
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

impl AppendArgs {
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
