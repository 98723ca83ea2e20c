//! The small operators around attention: KV append and merges of attention states.

use super::Context;
use super::check::{Extent, Named, finite, head_scales, required, scale};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{AppendArgs, KvLayout, LogBase, MergeArgs, MergeStatesArgs};
use crate::tensor::{Device, Tensor};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const CACHES: [DType; 5] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::F8E4M3,
    DType::F8E5M2,
];

/// The arguments of an append as the caller states them; [`AppendArgs`] says what each means.
#[derive(Debug, Clone, Copy)]
pub struct AppendInput {
    /// `[num_tokens or more, num_kv_heads, head_dim_qk]`.
    pub key: Option<Tensor>,
    /// `[num_tokens or more, num_kv_heads, head_dim_vo]`.
    pub value: Option<Tensor>,
    /// A paged cache in `layout`.
    pub k_cache: Option<Tensor>,
    /// A paged cache in `layout`.
    pub v_cache: Option<Tensor>,
    /// Dimension order of the caches.
    pub layout: KvLayout,
    /// Type that caches of plain bytes hold; `None` where the tensors say it themselves.
    pub kv_dtype: Option<DType>,
    /// `[num_tokens]` int32 or int64.
    pub slot_mapping: Option<Tensor>,
    /// Divisor of an fp8 cache; 0 means 1.
    pub k_scale: f32,
    /// As `k_scale`.
    pub v_scale: f32,
    /// fp32, 1 or `num_kv_heads` elements.
    pub k_scales: Option<Tensor>,
    /// fp32, 1 or `num_kv_heads` elements.
    pub v_scales: Option<Tensor>,
}

/// Writes new tokens to a paged cache.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn append(context: &Context, input: &AppendInput, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let slots = required("slot_mapping", input.slot_mapping)?
        .on(device)?
        .one_of(&[DType::I32, DType::I64])?
        .shaped(&[Extent::Any])?
        .compact()?
        .tensor;
    let (key, k_cache) = side(
        ("key", input.key),
        ("k_cache", input.k_cache),
        input,
        &slots,
        device,
    )?;
    let (value, v_cache) = side(
        ("value", input.value),
        ("v_cache", input.v_cache),
        input,
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
    let args = AppendArgs {
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping: slots,
        k_scale: cache_scale("k_scale", input.k_scale, &k_cache)?,
        v_scale: cache_scale("v_scale", input.v_scale, &v_cache)?,
        k_scales: cache_scales("k_scales", input.k_scales, &k_cache, heads, device)?,
        v_scales: cache_scales("v_scales", input.v_scales, &v_cache, heads, device)?,
    };
    check_slots(&args)?;
    context.backend().append(&args, stream)
}

fn side(
    (source_name, source): (&str, Option<Tensor>),
    (cache_name, cache): (&str, Option<Tensor>),
    input: &AppendInput,
    slots: &Tensor,
    device: Device,
) -> Result<(Tensor, Tensor)> {
    let source = required(source_name, source)?
        .on(device)?
        .one_of(&FLOATS)?
        .shaped(&[Extent::AtLeast(slots.extent(0)), Extent::Any, Extent::Any])?
        .unit_last_stride()?
        .tensor;
    let (heads, dim) = (Extent::Is(source.extent(1)), Extent::Is(source.extent(2)));
    let mut cache = required(cache_name, cache)?.on(device)?;
    if let Some(dtype) = input.kv_dtype {
        cache = cache.of(dtype)?;
    }
    let cache = cache.one_of(&CACHES)?;
    if !cache.tensor.dtype().is_fp8() && cache.tensor.dtype() != source.dtype() {
        return Err(Error::DType(format!(
            "{cache_name}: dtype {} is not accepted for a {source_name} of {}; the same type or fp8 is",
            cache.tensor.dtype(),
            source.dtype()
        )));
    }
    let cache = match (cache.tensor.rank(), input.layout) {
        (3, _) => cache.shaped(&[Extent::Any, heads, dim])?,
        (_, KvLayout::Nhd) => cache.shaped(&[Extent::Any, Extent::AtLeast(1), heads, dim])?,
        (_, KvLayout::Hnd) => cache.shaped(&[Extent::Any, heads, Extent::AtLeast(1), dim])?,
    };
    let cache = cache.unit_last_stride()?.writable()?.tensor;
    Ok((
        source,
        match (cache.rank(), input.layout) {
            (3, _) => cache.insert_dim(1),
            (_, KvLayout::Nhd) => cache,
            (_, KvLayout::Hnd) => cache.swap_dims(1, 2),
        },
    ))
}

/// Scales only make sense where values are rounded to fp8, and a cache value is divided by them.
fn cache_scale(name: &str, value: f32, cache: &Tensor) -> Result<f32> {
    let value = scale(name, value)?;
    if value != 1.0 && !cache.dtype().is_fp8() {
        return Err(Error::InvalidArgument(format!(
            "{name}: {value} is not accepted for a cache of {}; only fp8 caches are scaled",
            cache.dtype()
        )));
    }
    finite(&format!("1 / {name}"), 1.0 / value)?;
    Ok(value)
}

fn cache_scales(
    name: &str,
    scales: Option<Tensor>,
    cache: &Tensor,
    num_kv_heads: i64,
    device: Device,
) -> Result<Option<Tensor>> {
    if scales.is_some() && !cache.dtype().is_fp8() {
        return Err(Error::InvalidArgument(format!(
            "{name}: a tensor is not accepted for a cache of {}; only fp8 caches are scaled",
            cache.dtype()
        )));
    }
    head_scales(name, scales, num_kv_heads, device)
}

/// Slots on the host are checked one by one; on a device the kernel skips what lies outside.
fn check_slots(args: &AppendArgs) -> Result<()> {
    let Some(slots) = args.slot_mapping.as_slots() else {
        return Ok(());
    };
    let num_slots = args.k_cache.extent(0) * args.k_cache.extent(1);
    match slots.position_of(|slot| slot >= num_slots) {
        None => Ok(()),
        Some((token, slot)) => Err(Error::InvalidArgument(format!(
            "slot_mapping[{token}]: {slot} is not accepted; below num_pages · page_size ({num_slots}), or negative to skip the token, is"
        ))),
    }
}

/// The arguments of a merge of two states as the caller states them; see [`MergeArgs`].
#[derive(Debug, Clone, Copy)]
pub struct MergeInput {
    /// `[num_tokens, num_heads, head_dim]`.
    pub v_a: Option<Tensor>,
    /// `[num_tokens, num_heads]` fp32.
    pub s_a: Option<Tensor>,
    /// As `v_a`.
    pub v_b: Option<Tensor>,
    /// As `s_a`.
    pub s_b: Option<Tensor>,
    /// As `v_a`.
    pub v_out: Option<Tensor>,
    /// As `s_a`.
    pub s_out: Option<Tensor>,
    /// `[num_tokens]` bytes.
    pub mask: Option<Tensor>,
    /// All lse are in base 2.
    pub lse_base_2: bool,
}

/// Merges two attention states.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn merge(context: &Context, input: &MergeInput, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let v_a = required("v_a", input.v_a)?
        .on(device)?
        .one_of(&FLOATS)?
        .shaped(&[Extent::Any; 3])?
        .unit_last_stride()?
        .tensor;
    let extents = [0, 1, 2].map(|dim| Extent::Is(v_a.extent(dim)));
    let like_v = |name, tensor| {
        required(name, tensor)?
            .on(device)?
            .of(v_a.dtype())?
            .shaped(&extents)?
            .unit_last_stride()
    };
    let like_s = |name, tensor| {
        required(name, tensor)?
            .on(device)?
            .of(DType::F32)?
            .shaped(&extents[..2])
    };
    let mask = match input.mask {
        None => None,
        Some(tensor) => {
            let mask = Named {
                name: "mask",
                tensor,
            }
            .on(device)?
            .of(DType::U8)?;
            Some(mask.shaped(&extents[..1])?.compact()?.tensor)
        }
    };
    let args = MergeArgs {
        v_a,
        s_a: like_s("s_a", input.s_a)?.tensor,
        v_b: like_v("v_b", input.v_b)?.tensor,
        s_b: like_s("s_b", input.s_b)?.tensor,
        v_out: like_v("v_out", input.v_out)?.writable()?.tensor,
        s_out: optional_output("s_out", input.s_out, &extents[..2], device)?,
        mask,
        lse_base: base(input.lse_base_2),
    };
    context.backend().merge(&args, stream)
}

/// The arguments of a merge of n states as the caller states them; see [`MergeStatesArgs`].
#[derive(Debug, Clone, Copy)]
pub struct MergeStatesInput {
    /// `[num_tokens, n, num_heads, head_dim]`.
    pub v: Option<Tensor>,
    /// `[num_tokens, n, num_heads]` fp32.
    pub s: Option<Tensor>,
    /// `[num_tokens, num_heads, head_dim]`.
    pub v_out: Option<Tensor>,
    /// `[num_tokens, num_heads]` fp32.
    pub s_out: Option<Tensor>,
    /// All lse are in base 2.
    pub lse_base_2: bool,
}

/// Merges n attention states per row.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn merge_states(context: &Context, input: &MergeStatesInput, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let v = required("v", input.v)?
        .on(device)?
        .one_of(&FLOATS)?
        .shaped(&[Extent::Any; 4])?
        .unit_last_stride()?
        .tensor;
    let [tokens, n, heads, dim] = [0, 1, 2, 3].map(|d| Extent::Is(v.extent(d)));
    let s = required("s", input.s)?
        .on(device)?
        .of(DType::F32)?
        .shaped(&[tokens, n, heads])?;
    let v_out = required("v_out", input.v_out)?
        .on(device)?
        .of(v.dtype())?
        .shaped(&[tokens, heads, dim])?
        .unit_last_stride()?
        .writable()?;
    let args = MergeStatesArgs {
        v,
        s: s.tensor,
        v_out: v_out.tensor,
        s_out: optional_output("s_out", input.s_out, &[tokens, heads], device)?,
        lse_base: base(input.lse_base_2),
    };
    context.backend().merge_states(&args, stream)
}

fn optional_output(
    name: &str,
    tensor: Option<Tensor>,
    extents: &[Extent],
    device: Device,
) -> Result<Option<Tensor>> {
    let Some(tensor) = tensor else {
        return Ok(None);
    };
    let output = Named { name, tensor }.on(device)?.of(DType::F32)?;
    Ok(Some(output.shaped(extents)?.writable()?.tensor))
}

fn base(two: bool) -> LogBase {
    if two { LogBase::Two } else { LogBase::E }
}

fn same<T: PartialEq + std::fmt::Display>(name: &str, what: &str, is: T, wanted: T) -> Result<()> {
    if is == wanted {
        return Ok(());
    }
    Err(Error::Shape(format!(
        "{name}: {what} {is} is not accepted; {wanted}, as its counterpart has, is"
    )))
}
