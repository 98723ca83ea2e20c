//! Copying a cache's tokens to dense rows: the checks, and the call of the backend.

use super::Context;
use super::append::{cache_scale, cache_scales, paged, same, typed};
use super::beside::{Beside, Side, whole_parts};
use super::check::{Extent, FLOATS, Named};
use super::gathered::gathered_requests;
use crate::backend::Stream;
use crate::error::Result;
use crate::problem::{Checked, GatherArgs};
use crate::tensor::{Device, Tensor};

/// Copies keys and values of requests to dense rows.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn gather(context: &Context, args: &GatherArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let any = Extent::CountFrom(0);
    let (key, k_cache) = rows_and_cache(
        Side::Key,
        ("key", args.key, [any; 3]),
        ("k_cache", args.k_cache),
        args,
        device,
    )?;
    let [rows, heads] = [0, 1].map(|dim| Extent::Is(key.extent(dim)));
    let (value, v_cache) = rows_and_cache(
        Side::Value,
        ("value", args.value, [rows, heads, any]),
        ("v_cache", args.v_cache),
        args,
        device,
    )?;
    let dtype = |tensor: &Tensor| tensor.dtype().name();
    same("value", "dtype", dtype(&value), dtype(&key))?;
    same("v_cache", "dtype", dtype(&v_cache), dtype(&k_cache))?;
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
        is_output: false,
    };
    let (of_k, of_v) = (beside(&key, &k_cache), beside(&value, &v_cache));
    let checked = Checked::new(GatherArgs {
        key,
        value,
        k_cache,
        v_cache,
        requests: gathered_requests(&args.requests, device, ("key", &key), ("k_cache", &k_cache))?,
        k_scale: cache_scale("k_scale", args.k_scale, format)?,
        v_scale: cache_scale("v_scale", args.v_scale, format)?,
        k_scales: cache_scales("k_scales", args.k_scales, &of_k)?,
        v_scales: cache_scales("v_scales", args.v_scales, &of_v)?,
        k_zero_points: of_k.zero_points("k_zero_points", args.k_zero_points)?,
        v_zero_points: of_v.zero_points("v_zero_points", args.v_zero_points)?,
        ..*args
    });
    context.backend().gather(&checked, stream)
}

/// Rows and the cache that they come from.
fn rows_and_cache(
    side: Side,
    (rows_name, rows, extents): (&str, Tensor, [Extent; 3]),
    (cache_name, cache): (&str, Tensor),
    args: &GatherArgs,
    device: Device,
) -> Result<(Tensor, Tensor)> {
    let rows = Named {
        name: rows_name,
        tensor: rows,
    }
    .on(device)?
    .one_of(&FLOATS)?
    .shaped(&extents)?
    .unit_last_stride()?
    .writable()?
    .tensor;
    let cache = Named {
        name: cache_name,
        tensor: cache,
    }
    .on(device)?;
    let cache = typed(cache, args.form, args.kv_dtype, rows.dtype())?;
    let format = args.form.of(cache.tensor.dtype());
    whole_parts(rows_name, side, rows.extent(2), format)?;
    Ok((rows, paged(cache, side, format, &rows, args.layout)?))
}
