//! The checks of what formats of a cache have beside it, scales and zero points, and of caches in vLLM's first layout.

use super::check::{Extent, Named};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{CacheFormat, KvLayout, RowOrder, ScaleGranularity};
use crate::tensor::{Device, Tensor};

/// A cache of keys or of values, as far as the shapes of its scales follow from it.
pub(super) struct Beside {
    pub format: CacheFormat,
    pub layout: KvLayout,
    pub device: Device,
    /// Of the cache.
    pub num_pages: i64,
    pub page_size: i64,
    pub num_kv_heads: i64,
    /// Elements of a row.
    pub dim: i64,
    /// The call writes rows, and the scales that it computes.
    pub is_output: bool,
}

impl Beside {
    /// Scales of a format that has them beside the cache: as [`RowTensors`](crate::problem::RowTensors) says.
    pub fn scales(&self, name: &str, scales: Option<Tensor>) -> Result<Option<Tensor>> {
        let Some(tensor) = scales else {
            return Err(self.missing(name));
        };
        let named = Named { name, tensor }.on(self.device)?;
        let scales = match self.format.scales {
            ScaleGranularity::TokenHead => {
                let scales = named.of(DType::F32)?.shaped(&[
                    Extent::AtLeast(self.num_pages),
                    Extent::Is(self.page_size),
                    Extent::Is(self.num_kv_heads),
                ])?;
                self.computed(scales)?.tensor
            }
            ScaleGranularity::BlockBeside(block) => {
                let blocks = Extent::Is(self.dim / i64::from(block));
                let scales = self.paged(named.of(DType::F8E4M3)?, blocks)?;
                by_token(self.computed(scales)?.tensor, self.layout)
            }
            _ => self.per_channel(named)?,
        };
        Ok(Some(scales))
    }

    /// Zero points, where the format has them.
    pub fn zero_points(&self, name: &str, points: Option<Tensor>) -> Result<Option<Tensor>> {
        match (self.format.scales, points) {
            (ScaleGranularity::ChannelZeroPoint, None) => Err(self.missing(name)),
            (ScaleGranularity::ChannelZeroPoint, Some(tensor)) => {
                let points = Named { name, tensor }.on(self.device)?;
                self.per_channel(points).map(Some)
            }
            (_, None) => Ok(None),
            (_, Some(_)) => Err(Error::InvalidArgument(format!(
                "{name}: a tensor is not accepted with FOLIO_KV_FORMAT_{}; NULL is",
                self.format.form().name()
            ))),
        }
    }

    fn missing(&self, name: &str) -> Error {
        Error::InvalidArgument(format!(
            "{name}: NULL is not accepted with FOLIO_KV_FORMAT_{}; a tensor is",
            self.format.form().name()
        ))
    }

    fn computed<'a>(&self, scales: Named<'a>) -> Result<Named<'a>> {
        match self.is_output {
            true => scales.writable(),
            false => Ok(scales),
        }
    }

    fn per_channel(&self, named: Named<'_>) -> Result<Tensor> {
        let extents = [Extent::Is(self.num_kv_heads), Extent::Is(self.dim)];
        let named = named.of(DType::F32)?.shaped(&extents)?;
        Ok(named.unit_last_stride()?.tensor)
    }

    /// A tensor in the layout of the cache.
    fn paged<'a>(&self, named: Named<'a>, last: Extent) -> Result<Named<'a>> {
        let pages = Extent::AtLeast(self.num_pages);
        let (tokens, heads) = (Extent::Is(self.page_size), Extent::Is(self.num_kv_heads));
        let named = match (named.tensor.rank(), self.layout) {
            (3, _) if self.page_size == 1 => named.shaped(&[pages, heads, last])?,
            (_, KvLayout::Nhd) => named.shaped(&[pages, tokens, heads, last])?,
            (_, KvLayout::Hnd) => named.shaped(&[pages, heads, tokens, last])?,
        };
        named.unit_last_stride()
    }
}

/// A paged tensor as `[num_pages, page_size, num_kv_heads, dim]`.
pub(super) fn by_token(cache: Tensor, layout: KvLayout) -> Tensor {
    match (cache.rank(), layout) {
        (3, _) => cache.insert_dim(1),
        (_, KvLayout::Nhd) => cache,
        (_, KvLayout::Hnd) => cache.swap_dims(1, 2),
    }
}

/// Keys or values.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Side {
    Key,
    Value,
}

/// A cache in vLLM's first layout, as [`RowTensors`](crate::problem::RowTensors) says. `extents`: pages, tokens of a page,
/// heads.
pub(super) fn packed(
    cache: Named<'_>,
    side: Side,
    format: CacheFormat,
    [pages, tokens, heads]: [Extent; 3],
    dim: i64,
) -> Result<Tensor> {
    match side {
        Side::Key => {
            let x = i64::from(format.packed_elements());
            let parts = Extent::Is(dim / x);
            let cache = cache.shaped(&[pages, heads, parts, tokens, Extent::Is(x)])?;
            let cache = cache.unit_last_stride()?.tensor;
            // [page, head, part, token, x] to [page, token, head, part, x].
            Ok(cache.swap_dims(2, 3).swap_dims(1, 2))
        }
        Side::Value => {
            let cache = cache
                .shaped(&[pages, heads, Extent::Is(dim), tokens])?
                .tensor;
            // [page, head, dim, token] to [page, token, head, dim].
            Ok(cache.swap_dims(2, 3).swap_dims(1, 2))
        }
    }
}

/// Refuses rows that a format has no whole parts of. In vLLM's first layout that is a matter of keys.
pub(super) fn whole_parts(name: &str, side: Side, dim: i64, format: CacheFormat) -> Result<()> {
    let unit = match (format.order, side) {
        (RowOrder::Packed, Side::Value) => 1,
        _ => i64::from(format.dim_unit()),
    };
    if dim % unit == 0 {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "{name}: rows of {dim} elements are not supported with FOLIO_KV_FORMAT_{}; multiples of {unit} are",
        format.form().name()
    )))
}
