//! How keys and values are stored: the numbers that descs and appends share.

use super::tensor::folio_dtype;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{CacheForm, CacheFormat, KvLayout};

/// Cache dimensions `[num_pages, page_size, num_kv_heads, head_dim]`: FlashInfer's NHD.
pub const FOLIO_LAYOUT_NHD: i32 = 0;
/// Cache dimensions `[num_pages, num_kv_heads, page_size, head_dim]`: FlashInfer's HND.
pub const FOLIO_LAYOUT_HND: i32 = 1;

/// Keys and values lie in pages.
pub const FOLIO_KV_PAGED: i32 = 0;
/// Keys and values lie one request after the other: `[nnz_kv, num_kv_heads, head_dim]`.
pub const FOLIO_KV_RAGGED: i32 = 1;

/// Rows of a cache are elements one after the other: of the type of q (or key), or fp8 with a scale for all heads or for each.
pub const FOLIO_KV_FORMAT_PLAIN: i32 = 0;
/// Rows of int8 (the default) or float8_e4m3 with a scale for each token and head, which the append computes: the largest
/// magnitude of the row divided by 127 or 448, and 1e-6 at least (vLLM's int8_per_token_head and fp8_per_token_head).
/// A row is its elements times its scale. k_scales and v_scales are float32 `[num_pages or more, page_size, num_kv_heads]` in
/// both layouts, of any strides.
pub const FOLIO_KV_FORMAT_TOKEN_HEAD_SCALES: i32 = 1;
/// Rows of int8 with a fixed scale for each element of a head (FastDeploy's cache_int8): the append stores x / scale, rounded
/// to nearest even, within -127 to 127. k_scales are float32 `[num_kv_heads, head_dim_qk]`, v_scales
/// `[num_kv_heads, head_dim_vo]`, with unit stride on the last dimension.
pub const FOLIO_KV_FORMAT_CHANNEL_SCALES: i32 = 2;
/// Rows of int4 with a fixed scale and zero point for each element of a head (FastDeploy's cache_int4_zp): the append stores
/// x / scale + zero point, rounded to nearest even, within -8 to 7, in two's complement. (FastDeploy stores these numbers plus
/// 8, in an order of its own.) Two elements share a byte, the first in its low bits: a row of a cache has head_dim / 2 bytes,
/// as uint8 or as DLPack's int4 of two lanes. Scales and zero points are shaped as in FOLIO_KV_FORMAT_CHANNEL_SCALES.
pub const FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS: i32 = 3;
/// NVFP4 (FlashInfer's nvfp4_kv_quantize): rows of float4_e2m1 with a scale in float8_e4m3 for each 16 elements, and k_scale or
/// v_scale as the global scale: x is element · scale · k_scale. The append stores the largest magnitude of 16 elements,
/// divided by k_scale and by 6, as their scale. Two elements share a byte, the first in its low bits: a row of a cache has
/// head_dim / 2 bytes, as uint8 or as DLPack's float4_e2m1fn of two lanes. k_scales and v_scales are uint8 or float8_e4m3
/// `[num_pages or more, page_size, num_kv_heads, head_dim / 16]`, its two middle dimensions in the order of kv_layout, with
/// unit stride on the last dimension. Head dimensions are multiples of 16.
pub const FOLIO_KV_FORMAT_NVFP4: i32 = 4;
/// vLLM's layout of reshape_and_cache, of types as in FOLIO_KV_FORMAT_PLAIN: keys `[num_pages, num_kv_heads, head_dim_qk / x,
/// page_size, x]` with x = 16 / bytes of an element and unit stride on the last dimension, values `[num_pages, num_kv_heads,
/// head_dim_vo, page_size]` of any strides. Elements have 16 or 8 bits; head_dim_qk is a multiple of x. kv_layout is not read.
pub const FOLIO_KV_FORMAT_PACKED_KEYS: i32 = 5;

/// The form with this number.
pub(super) fn cache_form(value: i32) -> Result<CacheForm> {
    match value {
        FOLIO_KV_FORMAT_PLAIN => Ok(CacheForm::Plain),
        FOLIO_KV_FORMAT_TOKEN_HEAD_SCALES => Ok(CacheForm::TokenHeadScales),
        FOLIO_KV_FORMAT_CHANNEL_SCALES => Ok(CacheForm::ChannelScales),
        FOLIO_KV_FORMAT_CHANNEL_ZERO_POINTS => Ok(CacheForm::ChannelZeroPoints),
        FOLIO_KV_FORMAT_NVFP4 => Ok(CacheForm::Nvfp4),
        FOLIO_KV_FORMAT_PACKED_KEYS => Ok(CacheForm::PackedKeys),
        _ => Err(Error::InvalidArgument(format!(
            "kv_format: {value} is not accepted; a FOLIO_KV_FORMAT_ number (0 to {FOLIO_KV_FORMAT_PACKED_KEYS}) is"
        ))),
    }
}

/// The format of a desc's cache. A type that is all zero is the first that the form has.
pub(super) fn cache_format(
    kv_format: i32,
    kv_dtype: folio_dtype,
    q_dtype: DType,
) -> Result<CacheFormat> {
    let form = cache_form(kv_format)?;
    let default = form.elements(q_dtype)[0];
    Ok(form.of(kv_dtype.parse_or("kv_dtype", default)?))
}

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
