//! How keys and values are stored: the numbers that descs and appends share.

use crate::error::{Error, Result};
use crate::problem::KvLayout;

/// Cache dimensions `[num_pages, page_size, num_kv_heads, head_dim]`: FlashInfer's NHD.
pub const FOLIO_LAYOUT_NHD: i32 = 0;
/// Cache dimensions `[num_pages, num_kv_heads, page_size, head_dim]`: FlashInfer's HND.
pub const FOLIO_LAYOUT_HND: i32 = 1;

/// Keys and values lie in pages.
pub const FOLIO_KV_PAGED: i32 = 0;
/// Keys and values lie one request after the other: `[nnz_kv, num_kv_heads, head_dim]`.
pub const FOLIO_KV_RAGGED: i32 = 1;

/// The layout with this number.
pub(super) fn layout(name: &str, value: i32) -> Result<KvLayout> {
    match value {
        FOLIO_LAYOUT_NHD => Ok(KvLayout::Nhd),
        FOLIO_LAYOUT_HND => Ok(KvLayout::Hnd),
        _ => Err(Error::InvalidArgument(format!(
            "{name}: {value} is not accepted; FOLIO_LAYOUT_NHD (0) or FOLIO_LAYOUT_HND (1) is"
        ))),
    }
}
