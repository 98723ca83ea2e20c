//! Writing new tokens to a paged cache: the checks, and the call of the backend.

use super::Context;
use super::check::{Extent, FLOATS, Named, finite, head_scales, scale};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{AppendArgs, CacheFormat, Checked, KvLayout};
use crate::tensor::{Device, Tensor};

/// Types of a cache.
pub(super) const CACHES: [DType; 5] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F8E4M3,
    DType::F8E5M2,
];

/// Writes new tokens to a paged cache.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn append(context: &Context, args: &AppendArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let checked = Checked::new(checked_append(args, context.device())?);
    context.backend().append(&checked, stream)
}

/// The arguments of an append as backends get them.
pub(super) fn checked_append(args: &AppendArgs, device: Device) -> Result<AppendArgs> {
    let slots = Named {
        name: "slot_mapping",
        tensor: args.slot_mapping,
    }
    .on(device)?
    .one_of(&[DType::I32, DType::I64])?
    .shaped(&[Extent::CountFrom(0)])?
    .compact()?
    .tensor;
    let (key, k_cache) = side(
        ("key", args.key),
        ("k_cache", args.k_cache),
        args,
        &slots,
        device,
    )?;
    let (value, v_cache) = side(
        ("value", args.value),
        ("v_cache", args.v_cache),
        args,
        &slots,
        device,
    )?;
    same("value", "dtype", value.dtype().name(), key.dtype().name())?;
    same("value", "num_kv_heads", value.extent(1), key.extent(1))?;
    same(
        "v_cache",
        "dtype",
        v_cache.dtype().name(),
        k_cache.dtype().name(),
    )?;
    same("v_cache", "num_pages", v_cache.extent(0), k_cache.extent(0))?;
    same("v_cache", "page_size", v_cache.extent(1), k_cache.extent(1))?;
    let heads = key.extent(1);
    let checked = AppendArgs {
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping: slots,
        k_scale: divisor("k_scale", args.k_scale, &k_cache)?,
        v_scale: divisor("v_scale", args.v_scale, &v_cache)?,
        k_scales: cache_scales("k_scales", args.k_scales, &k_cache, heads, device)?,
        v_scales: cache_scales("v_scales", args.v_scales, &v_cache, heads, device)?,
        ..*args
    };
    check_slots(&slots, &k_cache)?;
    Ok(checked)
}

fn side(
    (source_name, source): (&str, Tensor),
    (cache_name, cache): (&str, Tensor),
    args: &AppendArgs,
    slots: &Tensor,
    device: Device,
) -> Result<(Tensor, Tensor)> {
    let source = Named {
        name: source_name,
        tensor: source,
    }
    .on(device)?
    .one_of(&FLOATS)?
    .shaped(&[
        Extent::AtLeast(slots.extent(0)),
        Extent::CountFrom(0),
        Extent::CountFrom(0),
    ])?
    .unit_last_stride()?
    .tensor;
    let mut cache = Named {
        name: cache_name,
        tensor: cache,
    }
    .on(device)?;
    if let Some(dtype) = args.kv_dtype {
        cache = cache.of(dtype)?;
    }
    let cache = cache.one_of(&CACHES)?;
    let scaled = CacheFormat::from(cache.tensor.dtype()).is_scaled();
    if !scaled && cache.tensor.dtype() != source.dtype() {
        return Err(Error::DType(format!(
            "{cache_name}: dtype {} is not accepted for a {source_name} of {}; the same type or fp8 is",
            cache.tensor.dtype(),
            source.dtype()
        )));
    }
    let cache = paged(cache, &source, args.layout)?.writable()?;
    Ok((source, by_token(cache.tensor, args.layout)))
}

/// A cache as it is stated, of the heads and dims of `rows`, `[row, head, dim]`.
pub(super) fn paged<'a>(cache: Named<'a>, rows: &Tensor, layout: KvLayout) -> Result<Named<'a>> {
    let (heads, dim) = (Extent::Is(rows.extent(1)), Extent::Is(rows.extent(2)));
    let cache = match (cache.tensor.rank(), layout) {
        (3, _) => cache.shaped(&[Extent::Any, heads, dim])?,
        (_, KvLayout::Nhd) => cache.shaped(&[Extent::Any, Extent::CountFrom(1), heads, dim])?,
        (_, KvLayout::Hnd) => cache.shaped(&[Extent::Any, heads, Extent::CountFrom(1), dim])?,
    };
    cache.unit_last_stride()
}

/// The same as `[num_pages, page_size, num_kv_heads, dim]`.
pub(super) fn by_token(cache: Tensor, layout: KvLayout) -> Tensor {
    match (cache.rank(), layout) {
        (3, _) => cache.insert_dim(1),
        (_, KvLayout::Nhd) => cache,
        (_, KvLayout::Hnd) => cache.swap_dims(1, 2),
    }
}

/// A cache value is divided by it.
fn divisor(name: &str, value: f32, cache: &Tensor) -> Result<f32> {
    let value = cache_scale(name, value, cache)?;
    finite(&format!("1 / {name}"), 1.0 / value)?;
    Ok(value)
}

/// Scales only make sense where values are rounded to fp8.
pub(super) fn cache_scale(name: &str, value: f32, cache: &Tensor) -> Result<f32> {
    let value = scale(name, value)?;
    if value != 1.0 && !CacheFormat::from(cache.dtype()).is_scaled() {
        return Err(Error::InvalidArgument(format!(
            "{name}: {value} is not accepted for a cache of {}; only fp8 caches are scaled",
            cache.dtype()
        )));
    }
    Ok(value)
}

pub(super) fn cache_scales(
    name: &str,
    scales: Option<Tensor>,
    cache: &Tensor,
    num_kv_heads: i64,
    device: Device,
) -> Result<Option<Tensor>> {
    if scales.is_some() && !CacheFormat::from(cache.dtype()).is_scaled() {
        return Err(Error::InvalidArgument(format!(
            "{name}: a tensor is not accepted for a cache of {}; only fp8 caches are scaled",
            cache.dtype()
        )));
    }
    head_scales(name, scales, num_kv_heads, device)
}

/// Slots on the host are checked one by one; on a device the kernel skips what lies outside. `cache` is
/// `[num_pages, page_size, ..]`.
pub(super) fn check_slots(slots: &Tensor, cache: &Tensor) -> Result<()> {
    let Some(slots) = slots.as_slots() else {
        return Ok(());
    };
    let num_slots = cache.extent(0).saturating_mul(cache.extent(1));
    match slots.position_of(|slot| slot >= num_slots) {
        None => Ok(()),
        Some((token, slot)) => Err(Error::InvalidArgument(format!(
            "slot_mapping[{token}]: {slot} is not accepted; below num_pages · page_size ({num_slots}), or negative to skip the token, is"
        ))),
    }
}

pub(super) fn same<T: PartialEq + std::fmt::Display>(
    name: &str,
    what: &str,
    is: T,
    wanted: T,
) -> Result<()> {
    if is == wanted {
        return Ok(());
    }
    Err(Error::Shape(format!(
        "{name}: {what} {is} is not accepted; {wanted}, as its counterpart has, is"
    )))
}
