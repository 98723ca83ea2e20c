//! Checks of what may change from layer to layer.

use super::beside::{Beside, Side, packed};
use super::check::{
    Extent, FLOATS, MOST_OUTPUT_SCALE, Named, finite, named, optional_lse, output_scale,
    output_scales, request_scales, scale,
};
use super::desc::HEAD_DIM_UNIT;
use super::planned::Planned;
use super::{mla, new_keys};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    AttentionArgs, AttentionDesc, CacheForm, Checked, Kind, KvLayout, KvStorage, Mask, MaskColumns,
    ScoreBias,
};
use crate::tensor::{Device, Tensor};

/// Checks the arguments of a run against the desc and the current plan.
pub(super) fn check(
    args: &AttentionArgs,
    desc: &AttentionDesc,
    planned: &Planned,
    device: Device,
) -> Result<Checked<AttentionArgs>> {
    if desc.kind == Kind::Mla {
        return mla::args(args, desc, planned, device);
    }
    new_keys::unwanted(args)?;
    if let Some(most) = planned.window_left {
        sees_no_further(args, most)?;
    }
    if args.q_rope.is_some() {
        return Err(Error::InvalidArgument(
            "q_rope: a tensor is not accepted but by MLA; none is".into(),
        ));
    }
    let run = RunOf {
        desc,
        planned,
        device,
    };
    let args = run.rows(args)?;
    let args = run.caches(&args)?;
    let args = run.scales(&args)?;
    let args = run.logits(&args)?;
    run.visible_keys(&args).map(Checked::new)
}

/// What arguments are checked against. Each step returns them with those that it checked as backends get them.
struct RunOf<'a> {
    desc: &'a AttentionDesc,
    planned: &'a Planned,
    device: Device,
}

impl RunOf<'_> {
    fn heads(&self) -> Extent {
        Extent::Is(self.desc.num_qo_heads.into())
    }

    /// What a row of q has, and what becomes of it.
    fn rows(&self, args: &AttentionArgs) -> Result<AttentionArgs> {
        let desc = self.desc;
        let tokens = Extent::AtLeast(self.planned.num_tokens);
        let rows = |name, tensor, dtype, dim: u32| {
            Named { name, tensor }
                .on(self.device)?
                .of(dtype)?
                .shaped(&[tokens, self.heads(), Extent::Is(dim.into())])?
                .unit_last_stride()
        };
        let q = rows("q", args.q, desc.q_dtype, desc.head_dim_qk)?.tensor;
        let o = rows("o", args.o, desc.o_dtype, desc.head_dim_vo)?;
        Ok(AttentionArgs {
            q,
            o: o.writable()?.tensor,
            lse: optional_lse("lse", args.lse, &[tokens, self.heads()], self.device)?,
            ..*args
        })
    }

    fn caches(&self, args: &AttentionArgs) -> Result<AttentionArgs> {
        let (desc, planned, device) = (self.desc, self.planned, self.device);
        let (k, k_rope) = keys(args, desc, planned, device)?;
        let side = (Side::Value, desc.head_dim_vo);
        let v = cache("v", args.v, desc, side, planned, device)?;
        Ok(AttentionArgs {
            k,
            k_rope,
            v,
            ..*args
        })
    }

    /// What elements of the tensors are multiplied by. Those of caches have been checked.
    fn scales(&self, args: &AttentionArgs) -> Result<AttentionArgs> {
        let (desc, device) = (self.desc, self.device);
        let of_requests = [self.planned.batch_size, desc.num_kv_heads.into()];
        let (of_k, of_v) = (
            self.beside(&args.k, desc.head_dim_qk),
            self.beside(&args.v, desc.head_dim_vo),
        );
        let of_cache = |name, scales, of: &Beside| match desc.kv_format.has_scales_beside() {
            true => of.scales(name, scales),
            false => request_scales(name, scales, of_requests, device),
        };
        let q_scales = request_scales("q_scales", args.q_scales, of_requests, device)?;
        let [sm_scale, q_scale, k_scale] = logits_scales(args, desc)?;
        Ok(AttentionArgs {
            sm_scale,
            q_scale,
            q_scales,
            k_scale,
            k_scales: of_cache("k_scales", args.k_scales, &of_k)?,
            k_zero_points: of_k.zero_points("k_zero_points", args.k_zero_points)?,
            v_scale: value_scale(args.v_scale)?,
            v_scales: of_cache("v_scales", args.v_scales, &of_v)?,
            v_zero_points: of_v.zero_points("v_zero_points", args.v_zero_points)?,
            o_scale: output_scale(args.o_scale, desc.o_dtype)?,
            o_scales: output_scales(args.o_scales, desc.o_dtype, device)?,
            ..*args
        })
    }

    /// What stands beside a cache of rows of `dim` elements.
    fn beside(&self, cache: &Tensor, dim: u32) -> Beside {
        let desc = self.desc;
        Beside {
            format: desc.kv_format,
            layout: match desc.kv {
                KvStorage::Paged { layout, .. } => layout,
                KvStorage::Ragged => KvLayout::Nhd,
            },
            device: self.device,
            num_pages: cache.extent(0),
            page_size: cache.extent(1),
            num_kv_heads: desc.num_kv_heads.into(),
            dim: dim.into(),
            is_output: false,
        }
    }

    /// What happens to logits beside their scale.
    fn logits(&self, args: &AttentionArgs) -> Result<AttentionArgs> {
        let per_head = |name, tensor: Option<Tensor>| {
            let dense = |tensor| {
                dense(
                    named(name, tensor),
                    DType::F32,
                    &[self.heads()],
                    self.device,
                )
            };
            tensor.map(dense).transpose()
        };
        let alibi_slopes = match args.alibi_slopes {
            Some(slopes) if slopes.rank() == 2 => {
                let extents = [Extent::Is(self.planned.batch_size), self.heads()];
                let slopes = named("alibi_slopes", slopes);
                Some(dense(slopes, DType::F32, &extents, self.device)?)
            }
            slopes => per_head("alibi_slopes", slopes)?,
        };
        if args.alibi_sqrt && alibi_slopes.is_none() {
            return Err(without("flags: ALIBI_SQRT", "alibi_slopes"));
        }
        Ok(AttentionArgs {
            logits_soft_cap: soft_cap(args.logits_soft_cap)?,
            alibi_slopes,
            score_bias: score_bias(args, self.desc, self.planned, self.device)?,
            sinks: per_head("sinks", args.sinks)?,
            ..*args
        })
    }

    /// Which keys a row sees.
    fn visible_keys(&self, args: &AttentionArgs) -> Result<AttentionArgs> {
        let (planned, device) = (self.planned, self.device);
        Ok(AttentionArgs {
            mask: mask(args, planned, device)?,
            custom_mask_indptr: custom_mask_indptr(args, planned, device)?,
            mm_prefix_ranges: mm_prefix(args, planned, device)?,
            ..*args
        })
    }
}

/// k, and k_rope where keys are in two parts.
fn keys(
    args: &AttentionArgs,
    desc: &AttentionDesc,
    planned: &Planned,
    device: Device,
) -> Result<(Tensor, Option<Tensor>)> {
    let Some(k_rope) = args.k_rope else {
        let side = (Side::Key, desc.head_dim_qk);
        let k = cache("k", args.k, desc, side, planned, device)?;
        return Ok((k, None));
    };
    if desc.kv_format.form() != CacheForm::Plain {
        return Err(Error::Unsupported(format!(
            "k_rope: a tensor is not supported with FOLIO_KV_FORMAT_{}; NULL, and whole keys in k, is",
            desc.kv_format.form().name()
        )));
    }
    if desc.kind != Kind::Prefill {
        return Err(Error::Unsupported(
            "k_rope: a tensor is not supported by decode; NULL, and whole keys in k, is".into(),
        ));
    }
    let nope_dim = nope_dim(&args.k, desc)?;
    let rope_dim = desc.head_dim_qk - nope_dim;
    let one_head = AttentionDesc {
        num_kv_heads: 1,
        ..*desc
    };
    Ok((
        cache("k", args.k, desc, (Side::Key, nope_dim), planned, device)?,
        Some(cache(
            "k_rope",
            with_head(k_rope, desc),
            &one_head,
            (Side::Key, rope_dim),
            planned,
            device,
        )?),
    ))
}

/// Elements of the rows of k where k_rope has the others.
fn nope_dim(k: &Tensor, desc: &AttentionDesc) -> Result<u32> {
    let most = desc.head_dim_qk - HEAD_DIM_UNIT;
    let last = k
        .shape()
        .last()
        .map_or(0, |&dim| u32::try_from(dim).unwrap_or(u32::MAX));
    if (HEAD_DIM_UNIT..=most).contains(&last) && last.is_multiple_of(HEAD_DIM_UNIT) {
        return Ok(last);
    }
    Err(Error::Shape(format!(
        "k: shape {:?} is not accepted with k_rope; rows of a multiple of {HEAD_DIM_UNIT} up to {most} elements are",
        k.shape()
    )))
}

/// k_rope with a dimension of one head, which the caller may leave out.
fn with_head(k_rope: Tensor, desc: &AttentionDesc) -> Tensor {
    match (desc.kv, k_rope.rank()) {
        (KvStorage::Ragged, 2) => k_rope.insert_dim(1),
        (KvStorage::Paged { page_size: 1, .. }, 2) => k_rope.insert_dim(1),
        (
            KvStorage::Paged {
                layout: KvLayout::Nhd,
                ..
            },
            3,
        ) => k_rope.insert_dim(2),
        (
            KvStorage::Paged {
                layout: KvLayout::Hnd,
                ..
            },
            3,
        ) => k_rope.insert_dim(1),
        _ => k_rope,
    }
}

/// A cache tensor as backends get it, with enough pages for the plan's ids.
fn cache(
    name: &str,
    tensor: Tensor,
    desc: &AttentionDesc,
    (side, dim): (Side, u32),
    planned: &Planned,
    device: Device,
) -> Result<Tensor> {
    let format = desc.kv_format;
    let named = Named { name, tensor }.on(device)?.of(format.element)?;
    let heads = Extent::Is(desc.num_kv_heads.into());
    let pages = Extent::AtLeast(planned.max_page_id + 1);
    if format.form() == CacheForm::PackedKeys {
        let extents = [pages, Extent::Is(desc.kv.page_size().into()), heads];
        return packed(named, side, format, extents, dim.into());
    }
    let dim = Extent::Is(format.tensor_elements(dim).into());
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

/// The bias with a dimension of heads.
fn score_bias(
    args: &AttentionArgs,
    desc: &AttentionDesc,
    planned: &Planned,
    device: Device,
) -> Result<Option<ScoreBias>> {
    let Some(bias) = args.score_bias else {
        return Ok(None);
    };
    let rows = Extent::CountFrom(match bias.request_rows {
        true => planned.most_rows,
        false => planned.num_tokens,
    });
    let columns = Extent::CountFrom(match bias.new_keys {
        true => planned.most_rows,
        false => planned.most_keys,
    });
    let named = named("score_bias", bias.tensor)
        .on(device)?
        .one_of(&FLOATS)?;
    let tensor = match bias.tensor.rank() {
        2 => named.shaped(&[rows, columns])?.tensor.insert_dim(0),
        _ if bias.tensor.shape().first() == Some(&1) => {
            let one_head = named.shaped(&[Extent::Is(1), rows, columns])?.tensor;
            one_head.remove_dim(0).insert_dim(0)
        }
        _ => {
            let heads = Extent::Is(desc.num_qo_heads.into());
            named.shaped(&[heads, rows, columns])?.tensor
        }
    };
    Ok(Some(ScoreBias { tensor, ..bias }))
}

/// Beyond it logits of ordinary rows come near the end of float32, and a difference of infinities is no number.
const MOST_LOGITS_SCALE: f32 = (1u64 << 60) as f32;

/// sm_scale, q_scale and k_scale, none of them 0, whose product is no larger than 2^60.
pub(super) fn logits_scales(args: &AttentionArgs, desc: &AttentionDesc) -> Result<[f32; 3]> {
    let sm_scale = match finite("sm_scale", args.sm_scale)? {
        0.0 => 1.0 / (desc.head_dim_qk as f32).sqrt(),
        stated => stated,
    };
    let (q_scale, k_scale) = (
        scale("q_scale", args.q_scale)?,
        scale("k_scale", args.k_scale)?,
    );
    let product = sm_scale * q_scale * k_scale;
    if product.abs() <= MOST_LOGITS_SCALE {
        return Ok([sm_scale, q_scale, k_scale]);
    }
    Err(Error::InvalidArgument(format!(
        "sm_scale · q_scale · k_scale: {product:e} is not accepted; -2^60 to 2^60 is"
    )))
}

fn value_scale(v_scale: f32) -> Result<f32> {
    let v_scale = scale("v_scale", v_scale)?;
    if v_scale.abs() <= MOST_OUTPUT_SCALE {
        return Ok(v_scale);
    }
    Err(Error::InvalidArgument(format!(
        "v_scale: {v_scale:e} is not accepted; -2^60 to 2^60 is"
    )))
}

/// Largest soft cap, and the reciprocal of the smallest: both are far from the ends of float32, and so are their
/// products with logits.
const MOST_SOFT_CAP: f32 = (1u64 << 60) as f32;

fn soft_cap(cap: f32) -> Result<f32> {
    if cap == 0.0 || (1.0 / MOST_SOFT_CAP..=MOST_SOFT_CAP).contains(&cap) {
        return Ok(cap);
    }
    Err(Error::InvalidArgument(format!(
        "logits_soft_cap: {cap:e} is not accepted; 0 (off) or 2^-60 to 2^60 is"
    )))
}

/// A tensor that lies in one piece.
fn dense(tensor: Named<'_>, dtype: DType, extents: &[Extent], device: Device) -> Result<Tensor> {
    let tensor = tensor.on(device)?.of(dtype)?.shaped(extents)?;
    Ok(tensor.compact()?.tensor)
}

fn mask(args: &AttentionArgs, planned: &Planned, device: Device) -> Result<Mask> {
    // Masks that start where the caller says may share elements, or lie apart.
    let custom = |tensor, needed| {
        let least = match args.custom_mask_indptr {
            Some(_) => 0,
            None => needed,
        };
        let mask = named("custom_mask", tensor);
        dense(mask, DType::U8, &[Extent::AtLeast(least)], device)
    };
    Ok(match args.mask {
        Mask::Causal | Mask::Full => args.mask,
        Mask::CausalByRequest(causal) => {
            let extents = [Extent::Is(planned.batch_size)];
            let causal = named("causal_requests", causal);
            Mask::CausalByRequest(dense(causal, DType::U8, &extents, device)?)
        }
        Mask::Items { starts, positions } => {
            let requests = Extent::Is(planned.batch_size);
            let starts = dense(
                named("item_starts", starts),
                DType::I64,
                &[requests],
                device,
            )?;
            let positions = named("item_positions", positions);
            let extents = [requests, Extent::CountFrom(0)];
            Mask::Items {
                starts,
                positions: dense(positions, DType::I32, &extents, device)?,
            }
        }
        Mask::Bytes(tensor) => Mask::Bytes(custom(tensor, planned.mask_bytes)?),
        Mask::Bits(tensor) => Mask::Bits(custom(tensor, planned.mask_bits)?),
    })
}

/// Where custom masks start, and whether that and the columns go with the mask.
fn custom_mask_indptr(
    args: &AttentionArgs,
    planned: &Planned,
    device: Device,
) -> Result<Option<Tensor>> {
    let is_custom = matches!(args.mask, Mask::Bytes(_) | Mask::Bits(_));
    if !is_custom && args.mask_columns != MaskColumns::Keys {
        return Err(without(
            "flags: MASK_SKIP_PREFIX or MASK_NEW_KEYS",
            "custom_mask",
        ));
    }
    let Some(tensor) = args.custom_mask_indptr else {
        return match args.mask_columns {
            MaskColumns::NewKeys => Err(without("flags: MASK_NEW_KEYS", "custom_mask_indptr")),
            _ => Ok(None),
        };
    };
    if !is_custom {
        return Err(without("custom_mask_indptr: a tensor", "custom_mask"));
    }
    let indptr = named("custom_mask_indptr", tensor);
    let extents = [Extent::Is(planned.batch_size + 1)];
    dense(indptr, DType::I64, &extents, device).map(Some)
}

/// Keys further left than the window that was planned for have no items.
fn sees_no_further(args: &AttentionArgs, most: u32) -> Result<()> {
    let refused = |what: &str, instead: &str| {
        Err(Error::InvalidArgument(format!(
            "{what} is not accepted by a plan for a window_left of {most}; {instead} is"
        )))
    };
    if args.mm_prefix_ranges.is_some() && !args.mm_prefix_in_window {
        return refused(
            "mm_prefix_ranges: a tensor",
            "one with FOLIO_RUN_MM_PREFIX_IN_WINDOW",
        );
    }
    if args.window.left.is_some_and(|left| left <= most) {
        return Ok(());
    }
    let left = args
        .window
        .left
        .map_or("-1 (unlimited)".into(), |left| left.to_string());
    refused(
        &format!("window_left: {left}"),
        &format!("0 to {most} with FOLIO_RUN_WINDOW in flags"),
    )
}

fn mm_prefix(args: &AttentionArgs, planned: &Planned, device: Device) -> Result<Option<Tensor>> {
    let Some(tensor) = args.mm_prefix_ranges else {
        return match args.mm_prefix_in_window {
            true => Err(without("flags: MM_PREFIX_IN_WINDOW", "mm_prefix_ranges")),
            false => Ok(None),
        };
    };
    let extents = [
        Extent::Is(planned.batch_size),
        Extent::CountFrom(0),
        Extent::Is(2),
    ];
    let ranges = named("mm_prefix_ranges", tensor);
    dense(ranges, DType::I32, &extents, device).map(Some)
}

fn without(what: &str, missing: &str) -> Error {
    Error::InvalidArgument(format!("{what} is not accepted without {missing}"))
}
