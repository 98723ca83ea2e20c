//! Checks of multi-head latent attention: its desc, and the tensors of a run, whose queries and keys come in two parts.

use super::check::{Extent, Named, finite, optional_lse, scale};
use super::planned::Planned;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    AttentionArgs, AttentionDesc, CacheFormat, Checked, KvLayout, KvStorage, Mask, MaskColumns,
    Window,
};
use crate::tensor::{Device, Tensor};

/// Widest latent and rotary rows: those of DeepSeek-V2 and its successors.
const MAX_LATENT: u32 = 512;
const MAX_ROPE: u32 = 64;
/// Both are multiples of this.
const DIM_UNIT: u32 = 8;
/// As of other attention: far above any model.
const MAX_HEADS: u32 = 4096;

/// Checks the types, heads, widths and storage of a desc.
pub(super) fn desc(desc: &AttentionDesc) -> Result<()> {
    dtypes(desc)?;
    if !(1..=MAX_HEADS).contains(&desc.num_qo_heads) {
        return Err(Error::InvalidArgument(format!(
            "num_heads: {} is not accepted; 1 to {MAX_HEADS} is",
            desc.num_qo_heads
        )));
    }
    widths(desc)?;
    let nhd = KvStorage::Paged {
        page_size: desc.kv.page_size(),
        layout: KvLayout::Nhd,
    };
    if desc.num_kv_heads != 1 || desc.kv != nhd {
        return Err(Error::Unsupported(format!(
            "kv: {:?} with {} heads is not supported by MLA; pages of records of one head are",
            desc.kv, desc.num_kv_heads
        )));
    }
    Ok(())
}

fn dtypes(desc: &AttentionDesc) -> Result<()> {
    let (q, kv, o) = (desc.q_dtype, desc.kv_format, desc.o_dtype);
    if q.is_fp8() {
        return beside_fp8_queries(desc);
    }
    if !q.is_float() {
        return Err(Error::Unsupported(format!(
            "q_dtype: {q} is not supported; float32, float16, bfloat16, float8_e4m3 and float8_e5m2 are"
        )));
    }
    let plain = kv == CacheFormat::plain(kv.element);
    if kv != CacheFormat::DS_MLA && !(plain && (kv.element == q || kv.element.is_fp8())) {
        return Err(Error::Unsupported(format!(
            "kv_dtype: {kv} is not supported with q_dtype {q}; the same type, float8_e4m3, float8_e5m2 and fp8_ds_mla are"
        )));
    }
    if o != q {
        return Err(Error::Unsupported(format!(
            "o_dtype: {o} is not supported with q_dtype {q}; the same type is"
        )));
    }
    Ok(())
}

/// Whether the cache and the output have types that queries in fp8 may stand beside.
fn beside_fp8_queries(desc: &AttentionDesc) -> Result<()> {
    let (q, kv, o) = (desc.q_dtype, desc.kv_format, desc.o_dtype);
    if kv != CacheFormat::plain(kv.element) || !kv.element.is_fp8() {
        return Err(Error::Unsupported(format!(
            "kv_dtype: {kv} is not supported with q_dtype {q}; float8_e4m3 and float8_e5m2 are"
        )));
    }
    if !matches!(o, DType::F16 | DType::BF16) {
        return Err(Error::Unsupported(format!(
            "o_dtype: {o} is not supported with q_dtype {q}; float16 and bfloat16 are"
        )));
    }
    Ok(())
}

fn widths(desc: &AttentionDesc) -> Result<()> {
    let rank = desc.head_dim_vo;
    if !(DIM_UNIT..=MAX_LATENT).contains(&rank) || !rank.is_multiple_of(DIM_UNIT) {
        return Err(Error::Unsupported(format!(
            "kv_lora_rank: {rank} is not supported; multiples of {DIM_UNIT} up to {MAX_LATENT} are"
        )));
    }
    let rope = i64::from(desc.head_dim_qk) - i64::from(rank);
    if !(0..=MAX_ROPE.into()).contains(&rope) || rope % i64::from(DIM_UNIT) != 0 {
        return Err(Error::Unsupported(format!(
            "qk_rope_head_dim: {rope} is not supported; 0 and multiples of {DIM_UNIT} up to {MAX_ROPE} are"
        )));
    }
    if desc.kv_format == CacheFormat::DS_MLA && (rank, rope) != (MAX_LATENT, MAX_ROPE.into()) {
        return Err(Error::Unsupported(format!(
            "kv_lora_rank, qk_rope_head_dim: {rank}, {rope} is not supported with fp8_ds_mla; {MAX_LATENT}, {MAX_ROPE} is"
        )));
    }
    Ok(())
}

/// Checks the arguments of a run against the desc and the current plan.
pub(super) fn args(
    args: &AttentionArgs,
    desc: &AttentionDesc,
    planned: &Planned,
    device: Device,
) -> Result<Checked<AttentionArgs>> {
    unused(args)?;
    let tokens = Extent::AtLeast(planned.num_tokens);
    let heads = Extent::Is(desc.num_qo_heads.into());
    let rows = |name, tensor, dtype, dim: u32| {
        Named { name, tensor }
            .on(device)?
            .of(dtype)?
            .shaped(&[tokens, heads, Extent::Is(dim.into())])?
            .unit_last_stride()
    };
    let q = rows("q_latent", args.q, desc.q_dtype, desc.head_dim_vo)?.tensor;
    let q_rope = match (args.q_rope, desc.rope_dim()) {
        (None, 0) => None,
        (Some(tensor), rope @ 1..) => Some(rows("q_rope", tensor, desc.q_dtype, rope)?.tensor),
        (None, rope) => {
            return Err(Error::InvalidArgument(format!(
                "q_rope: NULL is not accepted with qk_rope_head_dim {rope}; a tensor is"
            )));
        }
        (Some(_), _) => return Err(no_rope("q_rope")),
    };
    let o = rows("o", args.o, desc.o_dtype, desc.head_dim_vo)?
        .writable()?
        .tensor;
    let lse = optional_lse("lse", args.lse, &[tokens, heads], device)?;
    let [sm_scale, q_scale, k_scale] = scales(args)?;
    let (k, k_rope) = cache(args, desc, planned, device)?;
    Ok(Checked::new(AttentionArgs {
        q,
        q_rope,
        k,
        k_rope,
        v: k,
        o,
        lse,
        sm_scale,
        q_scale,
        k_scale,
        v_scale: k_scale,
        o_scale: 1.0,
        ..*args
    }))
}

/// Refuses what other attention takes and MLA does not.
fn unused(args: &AttentionArgs) -> Result<()> {
    let is_plain = matches!(args.mask, Mask::Causal | Mask::Full);
    let stated = [
        ("v", args.v.address() != args.k.address()),
        ("v_scale", args.v_scale != 0.0),
        ("o_scale", args.o_scale != 0.0),
        ("q_scales", args.q_scales.is_some()),
        ("o_scales", args.o_scales.is_some()),
        ("k_scales", args.k_scales.is_some()),
        ("k_zero_points", args.k_zero_points.is_some()),
        ("v_zero_points", args.v_zero_points.is_some()),
        ("v_scales", args.v_scales.is_some()),
        ("logits_soft_cap", args.logits_soft_cap != 0.0),
        ("mask: custom_mask or causal_requests", !is_plain),
        ("custom_mask_indptr", args.custom_mask_indptr.is_some()),
        (
            "flags: MASK_SKIP_PREFIX or MASK_NEW_KEYS",
            args.mask_columns != MaskColumns::Keys,
        ),
        ("attention_chunk_size", args.chunks.is_some()),
        ("flags: MM_PREFIX_IN_WINDOW", args.mm_prefix_in_window),
        ("window", args.window != Window::default()),
        ("mm_prefix_ranges", args.mm_prefix_ranges.is_some()),
        ("alibi_slopes", args.alibi_slopes.is_some()),
        ("flags: ALIBI_SQRT", args.alibi_sqrt),
        ("score_bias", args.score_bias.is_some()),
        ("sinks", args.sinks.is_some()),
    ];
    match stated.iter().find(|field| field.1) {
        None => Ok(()),
        Some((name, _)) => Err(Error::InvalidArgument(format!(
            "{name}: a value of its own is not accepted by MLA, whose values are the latent part of its keys; its default is"
        ))),
    }
}

/// Beyond it logits and outputs of ordinary rows come near the end of float32.
const MOST_SCALE: f32 = (1u64 << 60) as f32;

/// sm_scale, q_scale and k_scale, none of them 0. Their product is the factor of logits, k_scale that of outputs.
fn scales(args: &AttentionArgs) -> Result<[f32; 3]> {
    let sm_scale = finite("sm_scale", args.sm_scale)?;
    if sm_scale == 0.0 {
        return Err(Error::InvalidArgument(
            "sm_scale: 0 is not accepted; the scale of the model's own heads is, which does not follow from the latent width"
                .into(),
        ));
    }
    let (q_scale, k_scale) = (
        scale("q_scale", args.q_scale)?,
        scale("k_scale", args.k_scale)?,
    );
    for (name, factor) in [
        ("sm_scale · q_scale · k_scale", sm_scale * q_scale * k_scale),
        ("k_scale", k_scale),
    ] {
        if factor.is_nan() || factor.abs() > MOST_SCALE {
            return Err(Error::InvalidArgument(format!(
                "{name}: {factor:e} is not accepted; -2^60 to 2^60 is"
            )));
        }
    }
    Ok([sm_scale, q_scale, k_scale])
}

/// The cache as `[page, token, 1, dim]`: latent and rotary rows, or one tensor of `fp8_ds_mla` records.
fn cache(
    args: &AttentionArgs,
    desc: &AttentionDesc,
    planned: &Planned,
    device: Device,
) -> Result<(Tensor, Option<Tensor>)> {
    let (rank, rope) = (desc.head_dim_vo, desc.rope_dim());
    let part = |name, tensor, dtype, dim| records(name, tensor, dtype, dim, desc, planned, device);
    if desc.kv_format == CacheFormat::DS_MLA {
        if args.k_rope.is_some() {
            return Err(Error::InvalidArgument(
                "kv_rope: a tensor is not accepted with fp8_ds_mla, whose records hold it; NULL is"
                    .into(),
            ));
        }
        let bytes = desc.kv_format.row_bytes(desc.head_dim_qk) as u32;
        return Ok((part("kv", args.k, DType::U8, bytes)?, None));
    }
    let element = desc.kv_format.element;
    match args.k_rope {
        Some(_) if rope == 0 => Err(no_rope("kv_rope")),
        Some(k_rope) => Ok((
            part("kv", args.k, element, rank)?,
            Some(part("kv_rope", k_rope, element, rope)?),
        )),
        None => {
            let whole = part("kv", args.k, element, rank + rope)?;
            let latent = whole.narrow(3, 0, rank.into());
            let tail = whole.narrow(3, rank.into(), rope.into());
            Ok((latent, (rope > 0).then_some(tail)))
        }
    }
}

/// A cache tensor as `[page, token, 1, dim]`, with enough pages for the plan's ids.
fn records(
    name: &str,
    tensor: Tensor,
    dtype: DType,
    dim: u32,
    desc: &AttentionDesc,
    planned: &Planned,
    device: Device,
) -> Result<Tensor> {
    let named = Named { name, tensor }.on(device)?.of(dtype)?;
    let pages = Extent::AtLeast(planned.max_page_id + 1);
    let (tokens, dim) = (desc.kv.page_size(), Extent::Is(dim.into()));
    let by_token = tokens == 1 && named.tensor.rank() == 2;
    let named = match by_token {
        true => named.shaped(&[pages, dim])?,
        false => named.shaped(&[pages, Extent::Is(tokens.into()), dim])?,
    };
    let tensor = named.unit_last_stride()?.tensor;
    let tensor = if by_token {
        tensor.insert_dim(1)
    } else {
        tensor
    };
    Ok(tensor.insert_dim(2))
}

fn no_rope(name: &str) -> Error {
    Error::InvalidArgument(format!(
        "{name}: a tensor is not accepted with qk_rope_head_dim 0; NULL is"
    ))
}
