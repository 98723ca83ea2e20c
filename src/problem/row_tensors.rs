//! The tensors that rows of a cache are stored in.

use super::CacheFormat;
use crate::tensor::Tensor;

/// A cache of keys or of values, as backends get it.
#[derive(Debug, Clone, Copy)]
pub struct RowTensors {
    /// How a row is stored.
    pub format: CacheFormat,
    /// `[num_pages, page_size, num_kv_heads, elements of a row]`, in pairs where elements are pairs. `PackedKeys`: values
    /// the same with any stride of the last dimension, keys `[num_pages, page_size, num_kv_heads, head_dim / x, x]`.
    pub rows: Tensor,
    /// `TokenHeadScales`: `[num_pages or more, page_size, num_kv_heads]` fp32. `ChannelScales`, `ChannelZeroPoints`:
    /// `[num_kv_heads, head_dim]` fp32. `Nvfp4`: `[num_pages or more, page_size, num_kv_heads, head_dim / 16]` e4m3, of unit
    /// last stride. Other forms: `None`, or fp32 of 1 or `num_kv_heads` elements.
    pub scales: Option<Tensor>,
    /// `ChannelZeroPoints`: as `scales`. Other forms: `None`.
    pub zero_points: Option<Tensor>,
}

impl RowTensors {
    /// Those of keys and those of values.
    pub fn of_both(
        format: CacheFormat,
        rows: [Tensor; 2],
        scales: [Option<Tensor>; 2],
        zero_points: [Option<Tensor>; 2],
    ) -> [RowTensors; 2] {
        [0, 1].map(|side| RowTensors {
            format,
            rows: rows[side],
            scales: scales[side],
            zero_points: zero_points[side],
        })
    }

    /// Factors of whole heads: one, or one for each.
    pub fn head_scales(&self) -> Option<Tensor> {
        self.format.head_scales(self.scales)
    }

    /// Elements of a row.
    pub fn dim(&self) -> i64 {
        let last = match self.rows.rank() {
            5 => self.rows.extent(3) * self.rows.extent(4),
            _ => self.rows.extent(3),
        };
        last * i64::from(self.format.element.lanes())
    }
}
