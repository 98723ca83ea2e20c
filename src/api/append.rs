//! Writing new tokens to a paged cache: the checks, and the call of the backend.

use super::Context;
use super::beside::{Beside, Side, by_token, packed, whole_parts};
use super::check::{Extent, FLOATS, Named, finite, head_scales, scale};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{AppendArgs, CacheForm, CacheFormat, Checked, KvLayout};
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
    let (key, k_cache) = rows_and_cache(
        Side::Key,
        ("key", args.key),
        ("k_cache", args.k_cache),
        args,
        &slots,
        device,
    )?;
    let (value, v_cache) = rows_and_cache(
        Side::Value,
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
    let format = args.form.of(k_cache.dtype());
    let beside = |rows: &Tensor, cache: &Tensor| Beside {
        format,
        layout: args.layout,
        device,
        num_pages: cache.extent(0),
        page_size: cache.extent(1),
        num_kv_heads: rows.extent(1),
        dim: rows.extent(2),
        is_output: true,
    };
    let (of_k, of_v) = (beside(&key, &k_cache), beside(&value, &v_cache));
    let checked = AppendArgs {
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping: slots,
        k_scale: divisor("k_scale", args.k_scale, format)?,
        v_scale: divisor("v_scale", args.v_scale, format)?,
        k_scales: cache_scales("k_scales", args.k_scales, &of_k)?,
        v_scales: cache_scales("v_scales", args.v_scales, &of_v)?,
        k_zero_points: of_k.zero_points("k_zero_points", args.k_zero_points)?,
        v_zero_points: of_v.zero_points("v_zero_points", args.v_zero_points)?,
        ..*args
    };
    check_slots(&slots, &k_cache)?;
    Ok(checked)
}

fn rows_and_cache(
    side: Side,
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
    let cache = Named {
        name: cache_name,
        tensor: cache,
    }
    .on(device)?;
    let cache = typed(cache, args.form, args.kv_dtype, source.dtype())?;
    let format = args.form.of(cache.tensor.dtype());
    if !format.is_scaled() && cache.tensor.dtype() != source.dtype() {
        return Err(Error::DType(format!(
            "{cache_name}: dtype {} is not accepted for a {source_name} of {}; the same type or fp8 is",
            cache.tensor.dtype(),
            source.dtype()
        )));
    }
    let cache = cache.writable()?;
    whole_parts(source_name, side, source.extent(2), format)?;
    Ok((source, paged(cache, side, format, &source, args.layout)?))
}

/// A cache of the elements that are stated, or that go without saying.
pub(super) fn typed<'a>(
    cache: Named<'a>,
    form: CacheForm,
    stated: Option<DType>,
    rows: DType,
) -> Result<Named<'a>> {
    let elements = form.elements(rows);
    let is_bytes = form != CacheForm::Plain && cache.tensor.dtype() == DType::U8;
    let cache = match stated.or(is_bytes.then(|| elements[0])) {
        Some(dtype) => cache.of(dtype)?,
        None => cache,
    };
    match form {
        // Whether a type of its own goes with the rows is said apart.
        CacheForm::Plain | CacheForm::PackedKeys => cache.one_of(&CACHES),
        _ => cache.one_of(&elements),
    }
}

/// A cache of the heads and dims of `rows`, `[row, head, dim]`, as backends get it.
pub(super) fn paged(
    cache: Named<'_>,
    side: Side,
    format: CacheFormat,
    rows: &Tensor,
    layout: KvLayout,
) -> Result<Tensor> {
    let heads = Extent::Is(rows.extent(1));
    if format.form() == CacheForm::PackedKeys {
        let extents = [Extent::Any, Extent::CountFrom(1), heads];
        return packed(cache, side, format, extents, rows.extent(2));
    }
    let dim = Extent::Is(rows.extent(2) / i64::from(format.element.lanes()));
    let cache = match (cache.tensor.rank(), layout) {
        (3, _) => cache.shaped(&[Extent::Any, heads, dim])?,
        (_, KvLayout::Nhd) => cache.shaped(&[Extent::Any, Extent::CountFrom(1), heads, dim])?,
        (_, KvLayout::Hnd) => cache.shaped(&[Extent::Any, heads, Extent::CountFrom(1), dim])?,
    };
    Ok(by_token(cache.unit_last_stride()?.tensor, layout))
}

/// A cache value is divided by it.
fn divisor(name: &str, value: f32, format: CacheFormat) -> Result<f32> {
    let value = cache_scale(name, value, format)?;
    finite(&format!("1 / {name}"), 1.0 / value)?;
    Ok(value)
}

/// Scales only make sense where values are rounded to fewer bits.
pub(super) fn cache_scale(name: &str, value: f32, format: CacheFormat) -> Result<f32> {
    let value = scale(name, value)?;
    if value != 1.0 && !format.is_scaled() {
        return Err(Error::InvalidArgument(format!(
            "{name}: {value} is not accepted for a cache of {}; only fp8 caches are scaled",
            format.element
        )));
    }
    Ok(value)
}

pub(super) fn cache_scales(
    name: &str,
    scales: Option<Tensor>,
    of: &Beside,
) -> Result<Option<Tensor>> {
    if of.format.has_scales_beside() {
        return of.scales(name, scales);
    }
    if scales.is_some() && !of.format.is_scaled() {
        return Err(Error::InvalidArgument(format!(
            "{name}: a tensor is not accepted for a cache of {}; only fp8 caches are scaled",
            of.format.element
        )));
    }
    head_scales(name, scales, of.num_kv_heads, of.device)
}

/// Slots on the host are checked one by one; on a device the kernel skips what lies outside. `cache` is
/// `[num_pages, page_size, ..]`.
pub(super) fn check_slots(slots: &Tensor, cache: &Tensor) -> Result<()> {
    let Some(slots) = slots.as_integers() else {
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
