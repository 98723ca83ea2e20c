//! Writing new tokens to a cache of latent records, and copying records to dense rows: the checks, and the calls of
//! the backend.

use super::Context;
use super::append::{CACHES, check_slots};
use super::check::{Extent, FLOATS, Named, finite, named, required, scale};
use super::gathered::gathered_requests;
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    CacheFormat, Checked, DS_MLA_BLOCK, GatheredRequests, LatentCache, LatentRecords,
    MlaAppendArgs, MlaGatherArgs, Rotary,
};
use crate::tensor::{Device, Tensor};

/// Latent and rotary elements of a record.
#[derive(Clone, Copy)]
struct Widths {
    rank: i64,
    rope_dim: i64,
}

/// Those of `CacheFormat::DS_MLA`.
const DS_MLA: Widths = Widths {
    rank: 512,
    rope_dim: 64,
};

/// Writes new tokens to a cache of latent records.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn mla_append(context: &Context, args: &MlaAppendArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let slots = integers("slot_mapping", args.slot_mapping, device)?
        .shaped(&[Extent::CountFrom(0)])?
        .compact()?
        .tensor;
    let tokens = slots.extent(0);
    let is_ds_mla = args.cache.is_ds_mla;
    let wide = |dim| match is_ds_mla {
        true => Extent::Is(dim),
        false => Extent::CountFrom(1),
    };
    let latent = named("latent", args.latent).on(device)?.one_of(&FLOATS)?;
    let latent = rows(latent, tokens, wide(DS_MLA.rank))?;
    let rope = match args.rope {
        None if is_ds_mla => Some(required("rope", None)?.tensor),
        None => None,
        Some(tensor) => {
            let rope = named("rope", tensor).on(device)?.of(latent.dtype())?;
            Some(rows(rope, tokens, wide(DS_MLA.rope_dim))?)
        }
    };
    let widths = Widths {
        rank: latent.extent(1),
        rope_dim: rope.map_or(0, |rope| rope.extent(1)),
    };
    let cache = records(&args.cache, widths, device, Access::Write)?;
    let is_plain_copy = !is_ds_mla && !cache.latent.dtype().is_fp8();
    if is_plain_copy && cache.latent.dtype() != latent.dtype() {
        return Err(Error::DType(format!(
            "kv: dtype {} is not accepted for a latent of {}; the same type or fp8 is",
            cache.latent.dtype(),
            latent.dtype()
        )));
    }
    let rotary = match (&args.rotary, rope) {
        (None, _) => None,
        (Some(_), None) => {
            return Err(Error::InvalidArgument(
                "rope: NULL is not accepted with cos_sin_cache; a tensor is".into(),
            ));
        }
        (Some(stated), Some(rope)) => Some(rotary(stated, &rope, tokens, device)?),
    };
    let k_scale = cache_scale(args.k_scale, &cache)?;
    finite("1 / k_scale", 1.0 / k_scale)?;
    check_slots(&slots, &cache.latent)?;
    let checked = Checked::new(MlaAppendArgs {
        latent,
        rope,
        cache,
        slot_mapping: slots,
        k_scale,
        rotary,
    });
    context.backend().mla_append(&checked, stream)
}

/// Copies latent records to dense rows.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn mla_gather(context: &Context, args: &MlaGatherArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let checked = checked_gather(args, context.device())?;
    context.backend().mla_gather(&checked, stream)
}

/// The arguments of a gather as backends get them.
pub(super) fn checked_gather(
    args: &MlaGatherArgs,
    device: Device,
) -> Result<Checked<MlaGatherArgs<LatentRecords>>> {
    let widths = gathered_widths(args);
    let cache = records(&args.cache, widths, device, Access::Read)?;
    let dst = named("dst", args.dst).on(device)?.one_of(&FLOATS)?;
    let dim = match args.dst_rope {
        None => widths.rank + widths.rope_dim,
        Some(_) => widths.rank,
    };
    let dst = dst
        .shaped(&[Extent::CountFrom(0), Extent::Is(dim)])?
        .unit_last_stride()?
        .writable()?
        .tensor;
    let dst_rope = match args.dst_rope {
        None if widths.rope_dim == 0 => None,
        None => Some(part(&named("dst", dst), widths.rank, widths.rope_dim)?),
        Some(tensor) => {
            let dst_rope = named("dst_rope", tensor).on(device)?.of(dst.dtype())?;
            let extents = [Extent::Is(dst.extent(0)), Extent::Is(widths.rope_dim)];
            let dst_rope = dst_rope.shaped(&extents)?.unit_last_stride()?.writable()?;
            Some(dst_rope.tensor)
        }
    };
    let stated = GatheredRequests {
        cu_seq_lens: args.cu_seq_lens,
        seq_starts: args.seq_starts,
        pages: args.pages,
    };
    let GatheredRequests {
        cu_seq_lens,
        seq_starts,
        pages,
    } = gathered_requests(&stated, device, ("dst", &dst), ("kv", &cache.latent))?;
    Ok(Checked::new(MlaGatherArgs {
        cache,
        dst: part(&named("dst", dst), 0, widths.rank)?,
        dst_rope,
        cu_seq_lens,
        seq_starts,
        pages,
        k_scale: cache_scale(args.k_scale, &cache)?,
    }))
}

/// The tensors say where the latent part ends: an `fp8_ds_mla` record by itself, otherwise whichever side has two.
/// Where neither has, a record is copied as a whole.
fn gathered_widths(args: &MlaGatherArgs) -> Widths {
    let last = |tensor: &Tensor| tensor.shape().last().copied().unwrap_or(0);
    let of = |rank: &Tensor, rope: Option<&Tensor>| Widths {
        rank: last(rank),
        rope_dim: rope.map_or(0, last),
    };
    match (args.cache.is_ds_mla, &args.cache.kv_rope, &args.dst_rope) {
        (true, ..) => DS_MLA,
        (_, Some(kv_rope), _) => of(&args.cache.kv, Some(kv_rope)),
        (_, _, Some(dst_rope)) => of(&args.dst, Some(dst_rope)),
        _ => of(&args.cache.kv, None),
    }
}

/// What an operator does with a cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// The parts of a cache's records.
fn records(
    cache: &LatentCache,
    widths: Widths,
    device: Device,
    access: Access,
) -> Result<LatentRecords> {
    let pages = |tensor: Named<'_>, extents: [Extent; 3]| {
        let tensor = tensor.shaped(&extents)?.unit_last_stride()?;
        match access {
            Access::Read => Ok(tensor.tensor),
            Access::Write => tensor.writable().map(|tensor| tensor.tensor),
        }
    };
    let kv = named("kv", cache.kv).on(device)?;
    if cache.is_ds_mla {
        return ds_mla_records(cache, kv, |kv, dim| {
            pages(kv, [Extent::Any, Extent::CountFrom(1), Extent::Is(dim)])
        });
    }
    let typed = match cache.kv_dtype {
        Some(dtype) => kv.of(dtype)?,
        None => kv,
    };
    let typed = typed.one_of(&CACHES)?;
    let Widths { rank, rope_dim } = widths;
    let record = [Extent::Any, Extent::CountFrom(1)];
    match cache.kv_rope {
        None => {
            let kv = pages(typed, [record[0], record[1], Extent::Is(rank + rope_dim)])?;
            let kv = named("kv", kv);
            Ok(LatentRecords {
                latent: part(&kv, 0, rank)?,
                scales: None,
                rope: match rope_dim {
                    0 => None,
                    _ => Some(part(&kv, rank, rope_dim)?),
                },
            })
        }
        Some(_) if rope_dim == 0 && access == Access::Write => Err(Error::InvalidArgument(
            "kv_rope: a tensor is not accepted without rope; NULL is".into(),
        )),
        Some(kv_rope) => {
            let latent = pages(typed, [record[0], record[1], Extent::Is(rank)])?;
            let kv_rope = named("kv_rope", kv_rope).on(device)?.of(latent.dtype())?;
            let [num_pages, page_size] = [0, 1].map(|dim| Extent::Is(latent.extent(dim)));
            Ok(LatentRecords {
                latent,
                scales: None,
                rope: Some(pages(
                    kv_rope,
                    [num_pages, page_size, Extent::Is(rope_dim)],
                )?),
            })
        }
    }
}

fn ds_mla_records(
    cache: &LatentCache,
    kv: Named<'_>,
    pages: impl Fn(Named<'_>, i64) -> Result<Tensor>,
) -> Result<LatentRecords> {
    if cache.kv_rope.is_some() {
        return Err(Error::InvalidArgument(
            "kv_rope: a tensor is not accepted for fp8_ds_mla records; NULL is".into(),
        ));
    }
    if let Some(dtype) = cache.kv_dtype.filter(|dtype| *dtype != DType::F8E4M3) {
        return Err(Error::DType(format!(
            "kv_dtype: {dtype} is not accepted for fp8_ds_mla records; float8_e4m3 is"
        )));
    }
    let row = CacheFormat::DS_MLA.row_bytes((DS_MLA.rank + DS_MLA.rope_dim) as u32);
    let kv = pages(kv.one_of(&[DType::U8])?, row as i64)?;
    let num_scales = DS_MLA.rank / DS_MLA_BLOCK as i64;
    let scales_at = DS_MLA.rank as usize;
    let rope_at = scales_at + num_scales as usize * DType::F32.size();
    let part = |first, dtype, count| {
        kv.part_of_rows(first, dtype, count).ok_or_else(|| {
            Error::Shape(format!(
                "kv: address {:#x} and strides {:?} bytes are not accepted for fp8_ds_mla records; multiples of 4 are",
                kv.address(),
                kv.strides()
            ))
        })
    };
    Ok(LatentRecords {
        latent: part(0, DType::F8E4M3, DS_MLA.rank)?,
        scales: Some(part(scales_at, DType::F32, num_scales)?),
        rope: Some(part(rope_at, DType::BF16, DS_MLA.rope_dim)?),
    })
}

/// `count` elements of every row from `first` on.
fn part(rows: &Named<'_>, first: i64, count: i64) -> Result<Tensor> {
    let dtype = rows.tensor.dtype();
    let bytes = first as usize * dtype.size();
    let part = rows.tensor.part_of_rows(bytes, dtype, count);
    part.ok_or_else(|| Error::Internal(format!("{}: no part of its own type", rows.name)))
}

/// `[token, dim]`, whatever the caller has between the two.
fn rows(tensor: Named<'_>, tokens: i64, dim: Extent) -> Result<Tensor> {
    let tokens = Extent::AtLeast(tokens);
    let rows = match tensor.tensor.rank() {
        3 => tensor.shaped(&[tokens, Extent::Is(1), dim])?,
        _ => tensor.shaped(&[tokens, dim])?,
    };
    let rows = rows.unit_last_stride()?.tensor;
    Ok(match rows.rank() {
        3 => rows.remove_dim(1),
        _ => rows,
    })
}

fn rotary(stated: &Rotary, rope: &Tensor, tokens: i64, device: Device) -> Result<Rotary> {
    let (dtype, dim) = (rope.dtype(), rope.extent(1));
    if dim % 2 != 0 {
        return Err(Error::Shape(format!(
            "rope: shape {:?} is not accepted with cos_sin_cache; an even last dimension is",
            rope.shape()
        )));
    }
    let cos_sin_cache = named("cos_sin_cache", stated.cos_sin_cache)
        .on(device)?
        .one_of(&[DType::F32, dtype])?
        .shaped(&[Extent::Any, Extent::Is(dim)])?
        .unit_last_stride()?
        .tensor;
    let positions = integers("positions", stated.positions, device)?
        .shaped(&[Extent::Is(tokens)])?
        .compact()?
        .tensor;
    let rope_out = match stated.rope_out {
        None => None,
        Some(tensor) => {
            let out = named("rope_out", tensor).on(device)?.of(dtype)?;
            Some(rows(out.writable()?, tokens, Extent::Is(dim))?)
        }
    };
    let heads_of = |name, tensor, heads| {
        named(name, tensor)
            .on(device)?
            .of(dtype)?
            .shaped(&[Extent::AtLeast(tokens), heads, Extent::Is(dim)])?
            .unit_last_stride()
    };
    let (q_rope, q_rope_out) = match (stated.q_rope, stated.q_rope_out) {
        (None, None) => (None, None),
        (None, Some(_)) => {
            return Err(Error::InvalidArgument(
                "q_rope_out: a tensor is not accepted without q_rope; NULL is".into(),
            ));
        }
        (Some(q), out) => {
            let q = heads_of("q_rope", q, Extent::CountFrom(0))?;
            let heads = Extent::Is(q.tensor.extent(1));
            let out = match out {
                None => q,
                Some(out) => heads_of("q_rope_out", out, heads)?,
            };
            (Some(q.tensor), Some(out.writable()?.tensor))
        }
    };
    check_positions(&positions, cos_sin_cache.extent(0))?;
    Ok(Rotary {
        cos_sin_cache,
        positions,
        is_interleaved: stated.is_interleaved,
        rope_out,
        q_rope,
        q_rope_out,
    })
}

/// As slots: on a device the kernel skips tokens whose position lies outside.
fn check_positions(positions: &Tensor, max_position: i64) -> Result<()> {
    let Some(positions) = positions.as_integers() else {
        return Ok(());
    };
    match positions.position_of(|position| !(0..max_position).contains(&position)) {
        None => Ok(()),
        Some((token, position)) => Err(Error::InvalidArgument(format!(
            "positions[{token}]: {position} is not accepted; 0 or more and below the rows of cos_sin_cache ({max_position}) is"
        ))),
    }
}

/// Scales only make sense for plain fp8: other records hold values as they are, or scales of their own.
fn cache_scale(value: f32, cache: &LatentRecords) -> Result<f32> {
    let value = scale("k_scale", value)?;
    let format = match cache.scales {
        Some(_) => CacheFormat::DS_MLA,
        None => CacheFormat::plain(cache.latent.dtype()),
    };
    if value != 1.0
        && format != CacheFormat::plain(DType::F8E4M3)
        && format != CacheFormat::plain(DType::F8E5M2)
    {
        return Err(Error::InvalidArgument(format!(
            "k_scale: {value} is not accepted for a cache of {format}; only plain fp8 caches are scaled"
        )));
    }
    Ok(value)
}

fn integers(name: &str, tensor: Tensor, device: Device) -> Result<Named<'_>> {
    named(name, tensor)
        .on(device)?
        .one_of(&[DType::I32, DType::I64])
}
