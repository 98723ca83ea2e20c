//! Merging attention states: the checks, and the call of the backend.

use super::Context;
use super::check::{Extent, FLOATS, Named};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::{Checked, MergeArgs, MergeStatesArgs};
use crate::tensor::{Device, Tensor};

/// Merges two attention states.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn merge(context: &Context, args: &MergeArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let v_a = named("v_a", args.v_a)
        .on(device)?
        .one_of(&FLOATS)?
        .shaped(&[Extent::CountFrom(0); 3])?
        .unit_last_stride()?
        .tensor;
    let extents = [0, 1, 2].map(|dim| Extent::Is(v_a.extent(dim)));
    let like_v = |name, tensor| {
        named(name, tensor)
            .on(device)?
            .of(v_a.dtype())?
            .shaped(&extents)?
            .unit_last_stride()
    };
    let like_s = |name, tensor| {
        named(name, tensor)
            .on(device)?
            .of(DType::F32)?
            .shaped(&extents[..2])
    };
    let mask = match args.mask {
        None => None,
        Some(tensor) => {
            let mask = named("mask", tensor).on(device)?.of(DType::U8)?;
            Some(mask.shaped(&extents[..1])?.compact()?.tensor)
        }
    };
    let checked = Checked::new(MergeArgs {
        v_a,
        s_a: like_s("s_a", args.s_a)?.tensor,
        v_b: like_v("v_b", args.v_b)?.tensor,
        s_b: like_s("s_b", args.s_b)?.tensor,
        v_out: like_v("v_out", args.v_out)?.writable()?.tensor,
        s_out: optional_output("s_out", args.s_out, &extents[..2], device)?,
        mask,
        lse_base: args.lse_base,
    });
    context.backend().merge(&checked, stream)
}

/// Merges n attention states per row.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn merge_states(context: &Context, args: &MergeStatesArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let v = named("v", args.v)
        .on(device)?
        .one_of(&FLOATS)?
        .shaped(&[Extent::CountFrom(0); 4])?
        .unit_last_stride()?
        .tensor;
    let [tokens, n, heads, dim] = [0, 1, 2, 3].map(|d| Extent::Is(v.extent(d)));
    let s = named("s", args.s)
        .on(device)?
        .of(DType::F32)?
        .shaped(&[tokens, n, heads])?;
    let v_out = named("v_out", args.v_out)
        .on(device)?
        .of(v.dtype())?
        .shaped(&[tokens, heads, dim])?
        .unit_last_stride()?
        .writable()?;
    let checked = Checked::new(MergeStatesArgs {
        v,
        s: s.tensor,
        v_out: v_out.tensor,
        s_out: optional_output("s_out", args.s_out, &[tokens, heads], device)?,
        lse_base: args.lse_base,
    });
    context.backend().merge_states(&checked, stream)
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
    let output = named(name, tensor).on(device)?.of(DType::F32)?;
    Ok(Some(output.shaped(extents)?.writable()?.tensor))
}

fn named(name: &str, tensor: Tensor) -> Named<'_> {
    Named { name, tensor }
}
