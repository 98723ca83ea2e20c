//! Checks of what may change from layer to layer.

use super::attention::Planned;
use super::check::{Extent, Named, finite, head_scales, required, scale};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{AttentionArgs, AttentionDesc, KvLayout, KvStorage, LogBase, Mask, Window};
use crate::tensor::{Device, Tensor};

/// Which base mask a run uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MaskMode {
    /// Bottom-right aligned causal.
    #[default]
    Causal,
    /// Every key.
    Full,
    /// `custom_mask` holds a byte per (row, key).
    CustomBytes,
    /// `custom_mask` holds a bit per (row, key).
    CustomBits,
}

/// The arguments of a run as the caller states them. [`AttentionArgs`] says what each means.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunInput {
    /// `[num_tokens or more, num_qo_heads, head_dim_qk]`.
    pub q: Option<Tensor>,
    /// Paged: `[num_pages, page_size, num_kv_heads, head_dim_qk]` (NHD), `[num_pages, num_kv_heads,
    /// page_size, head_dim_qk]` (HND), or without the page dimension where page_size is 1. Ragged:
    /// `[nnz_kv, num_kv_heads, head_dim_qk]`.
    pub k: Option<Tensor>,
    /// As `k`, with `head_dim_vo`.
    pub v: Option<Tensor>,
    /// `[num_tokens or more, num_qo_heads, head_dim_vo]`.
    pub o: Option<Tensor>,
    /// `[num_tokens or more, num_qo_heads]` fp32.
    pub lse: Option<Tensor>,
    /// `lse` in base 2 instead of e.
    pub lse_base_2: bool,
    /// Factor on q·k; 0 means `1 / sqrt(head_dim_qk)`.
    pub sm_scale: f32,
    /// Further factors; 0 means 1.
    pub q_scale: f32,
    /// See `q_scale`.
    pub k_scale: f32,
    /// Factor on the output; 0 means 1.
    pub v_scale: f32,
    /// Divisor of an fp8 output; 0 means 1.
    pub o_scale: f32,
    /// fp32, 1 or `num_kv_heads` elements.
    pub k_scales: Option<Tensor>,
    /// fp32, 1 or `num_kv_heads` elements.
    pub v_scales: Option<Tensor>,
    /// 0 is off.
    pub logits_soft_cap: f32,
    /// The base mask.
    pub mask_mode: MaskMode,
    /// For the custom modes.
    pub custom_mask: Option<Tensor>,
    /// `(left, right)`, each -1 for unlimited; `None` for no window.
    pub window: Option<(i32, i32)>,
    /// `[batch_size, num_ranges, 2]` int32.
    pub mm_prefix_ranges: Option<Tensor>,
    /// `[num_qo_heads]` fp32.
    pub alibi_slopes: Option<Tensor>,
    /// ALiBi in its square-root form.
    pub alibi_sqrt: bool,
    /// `[num_qo_heads]` fp32.
    pub sinks: Option<Tensor>,
}

/// Checks the arguments of a run against the desc and the current plan.
pub(super) fn check(
    input: &RunInput,
    desc: &AttentionDesc,
    planned: &Planned,
    device: Device,
) -> Result<AttentionArgs> {
    let heads = Extent::Is(desc.num_qo_heads.into());
    let tokens = Extent::AtLeast(planned.num_tokens);
    let rows = |name, tensor, dtype, dim: u32| {
        required(name, tensor)?
            .on(device)?
            .of(dtype)?
            .shaped(&[tokens, heads, Extent::Is(dim.into())])?
            .unit_last_stride()
    };
    let q = rows("q", input.q, desc.q_dtype, desc.head_dim_qk)?.tensor;
    let o = rows("o", input.o, desc.o_dtype, desc.head_dim_vo)?
        .writable()?
        .tensor;
    let lse = match input.lse {
        None => None,
        Some(tensor) => {
            let lse = Named {
                name: "lse",
                tensor,
            }
            .on(device)?
            .of(DType::F32)?;
            Some(lse.shaped(&[tokens, heads])?.writable()?.tensor)
        }
    };
    if input.lse_base_2 && lse.is_none() {
        return Err(without("flags: LSE_BASE_2", "lse"));
    }
    let per_head = |name, tensor: Option<Tensor>| match tensor {
        None => Ok(None),
        Some(tensor) => {
            let tensor = Named { name, tensor }.on(device)?.of(DType::F32)?;
            Ok::<_, Error>(Some(tensor.shaped(&[heads])?.compact()?.tensor))
        }
    };
    let alibi_slopes = per_head("alibi_slopes", input.alibi_slopes)?;
    if input.alibi_sqrt && alibi_slopes.is_none() {
        return Err(without("flags: ALIBI_SQRT", "alibi_slopes"));
    }
    let kv_heads = i64::from(desc.num_kv_heads);
    Ok(AttentionArgs {
        q,
        k: cache("k", input.k, desc, desc.head_dim_qk, planned, device)?,
        v: cache("v", input.v, desc, desc.head_dim_vo, planned, device)?,
        o,
        lse,
        lse_base: if input.lse_base_2 {
            LogBase::Two
        } else {
            LogBase::E
        },
        logits_scale: logits_scale(input, desc)?,
        k_scales: head_scales("k_scales", input.k_scales, kv_heads, device)?,
        v_scale: scale("v_scale", input.v_scale)?,
        v_scales: head_scales("v_scales", input.v_scales, kv_heads, device)?,
        o_scale: output_scale(input, desc)?,
        logits_soft_cap: soft_cap(input.logits_soft_cap)?,
        mask: mask(input, planned, device)?,
        window: window(input.window)?,
        mm_prefix_ranges: mm_prefix(input.mm_prefix_ranges, planned, device)?,
        alibi_slopes,
        alibi_sqrt: input.alibi_sqrt,
        sinks: per_head("sinks", input.sinks)?,
    })
}

/// A cache tensor as `[page, token, head, dim]`, with enough pages for the plan's ids.
fn cache(
    name: &str,
    tensor: Option<Tensor>,
    desc: &AttentionDesc,
    dim: u32,
    planned: &Planned,
    device: Device,
) -> Result<Tensor> {
    let named = required(name, tensor)?.on(device)?.of(desc.kv_dtype)?;
    let heads = Extent::Is(desc.num_kv_heads.into());
    let dim = Extent::Is(dim.into());
    let pages = Extent::AtLeast(planned.max_page_id + 1);
    let named = match desc.kv {
        KvStorage::Ragged => named.shaped(&[Extent::AtLeast(planned.kv_rows), heads, dim])?,
        KvStorage::Paged { page_size: 1, .. } if named.tensor.rank() == 3 => {
            named.shaped(&[pages, heads, dim])?
        }
        KvStorage::Paged { page_size, layout } => {
            let tokens = Extent::Is(page_size.into());
            match layout {
                KvLayout::Nhd => named.shaped(&[pages, tokens, heads, dim])?,
                KvLayout::Hnd => named.shaped(&[pages, heads, tokens, dim])?,
            }
        }
    };
    let tensor = named.unit_last_stride()?.tensor;
    Ok(match desc.kv {
        _ if tensor.rank() == 3 => tensor.insert_dim(1),
        KvStorage::Paged {
            layout: KvLayout::Hnd,
            ..
        } => tensor.swap_dims(1, 2),
        _ => tensor,
    })
}

fn logits_scale(input: &RunInput, desc: &AttentionDesc) -> Result<f32> {
    let sm_scale = match finite("sm_scale", input.sm_scale)? {
        0.0 => 1.0 / (desc.head_dim_qk as f32).sqrt(),
        stated => stated,
    };
    let product = sm_scale * scale("q_scale", input.q_scale)? * scale("k_scale", input.k_scale)?;
    finite("sm_scale · q_scale · k_scale", product)
}

fn output_scale(input: &RunInput, desc: &AttentionDesc) -> Result<f32> {
    let o_scale = scale("o_scale", input.o_scale)?;
    if o_scale != 1.0 && !desc.o_dtype.is_fp8() {
        return Err(Error::InvalidArgument(format!(
            "o_scale: {o_scale} is not accepted with o_dtype {}; only fp8 outputs are scaled",
            desc.o_dtype
        )));
    }
    if o_scale < 0.0 {
        return Err(Error::InvalidArgument(format!(
            "o_scale: {o_scale} is not accepted; a positive number is"
        )));
    }
    Ok(o_scale)
}

fn soft_cap(cap: f32) -> Result<f32> {
    if finite("logits_soft_cap", cap)? >= 0.0 {
        return Ok(cap);
    }
    Err(Error::InvalidArgument(format!(
        "logits_soft_cap: {cap} is not accepted; 0 (off) or a positive number is"
    )))
}

fn mask(input: &RunInput, planned: &Planned, device: Device) -> Result<Mask> {
    let (len, make): (i64, fn(Tensor) -> Mask) = match input.mask_mode {
        MaskMode::CustomBytes => (planned.mask_bytes, Mask::Bytes),
        MaskMode::CustomBits => (planned.mask_bits, Mask::Bits),
        _ if input.custom_mask.is_some() => {
            return Err(Error::InvalidArgument(format!(
                "custom_mask: a tensor is not accepted with mask_mode {:?}; NULL is",
                input.mask_mode
            )));
        }
        MaskMode::Causal => return Ok(Mask::Causal),
        MaskMode::Full => return Ok(Mask::Full),
    };
    let mask = required("custom_mask", input.custom_mask)?
        .on(device)?
        .of(DType::U8)?;
    Ok(make(
        mask.shaped(&[Extent::AtLeast(len)])?.compact()?.tensor,
    ))
}

fn window(window: Option<(i32, i32)>) -> Result<Window> {
    let side = |name: &str, value: i32| match value {
        -1 => Ok(None),
        0.. => Ok(Some(value as u32)),
        _ => Err(Error::InvalidArgument(format!(
            "{name}: {value} is not accepted; -1 (unlimited) or more is"
        ))),
    };
    let (left, right) = window.unwrap_or((-1, -1));
    Ok(Window {
        left: side("window_left", left)?,
        right: side("window_right", right)?,
    })
}

fn mm_prefix(ranges: Option<Tensor>, planned: &Planned, device: Device) -> Result<Option<Tensor>> {
    let Some(tensor) = ranges else {
        return Ok(None);
    };
    let extents = [Extent::Is(planned.batch_size), Extent::Any, Extent::Is(2)];
    let ranges = Named {
        name: "mm_prefix_ranges",
        tensor,
    }
    .on(device)?
    .of(DType::I32)?;
    Ok(Some(ranges.shaped(&extents)?.compact()?.tensor))
}

fn without(what: &str, missing: &str) -> Error {
    Error::InvalidArgument(format!("{what} is not accepted without {missing}"))
}
