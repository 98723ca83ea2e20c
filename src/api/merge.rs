//! Merging attention states: the checks, and the call of the backend.

use super::Context;
use super::check::{Extent, FLOATS, named, optional_lse, output_scale, rising};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{Checked, MergeArgs, MergeStatesArgs, MergeVarlenArgs};
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
    let v_b = named("v_b", args.v_b)
        .on(device)?
        .of(v_a.dtype())?
        .shaped(&extents)?
        .unit_last_stride()?
        .tensor;
    let s_a = lse("s_a", args.s_a, &extents[..2], device)?;
    let s_b = named("s_b", args.s_b)
        .on(device)?
        .of(s_a.dtype())?
        .shaped(&extents[..2])?
        .tensor;
    let mask = match args.mask {
        None => None,
        Some(tensor) => {
            let mask = named("mask", tensor).on(device)?.of(DType::U8)?;
            Some(mask.shaped(&extents[..1])?.compact()?.tensor)
        }
    };
    let v_out = merged(args.v_out, v_a.dtype(), &extents, device)?;
    let num_tokens = v_a.extent(0);
    if !(0..=num_tokens).contains(&args.num_tokens_without_a) {
        return Err(Error::InvalidArgument(format!(
            "num_tokens_without_a: {} is not accepted; 0 to {num_tokens}, the tokens, is",
            args.num_tokens_without_a
        )));
    }
    let checked = Checked::new(MergeArgs {
        v_a,
        s_a,
        v_b,
        s_b,
        v_out,
        s_out: optional_lse("s_out", args.s_out, &extents[..2], device)?,
        mask,
        lse_base: args.lse_base,
        num_tokens_without_a: args.num_tokens_without_a,
        o_scale: output_scale(args.o_scale, v_out.dtype())?,
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
    let s = lse("s", args.s, &[tokens, n, heads], device)?;
    let v_out = merged(args.v_out, v.dtype(), &[tokens, heads, dim], device)?;
    let checked = Checked::new(MergeStatesArgs {
        v,
        s,
        v_out,
        s_out: optional_lse("s_out", args.s_out, &[tokens, heads], device)?,
        lse_base: args.lse_base,
        o_scale: output_scale(args.o_scale, v_out.dtype())?,
    });
    context.backend().merge_states(&checked, stream)
}

/// Merges as many attention states per token as it has.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn merge_varlen(context: &Context, args: &MergeVarlenArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let v = named("v", args.v)
        .on(device)?
        .one_of(&FLOATS)?
        .shaped(&[Extent::CountFrom(0); 3])?
        .unit_last_stride()?
        .tensor;
    let [num_states, heads, dim] = [0, 1, 2].map(|d| Extent::Is(v.extent(d)));
    let s = lse("s", args.s, &[num_states, heads], device)?;
    let indptr = named("indptr", args.indptr)
        .on(device)?
        .of(DType::I32)?
        .shaped(&[Extent::CountFrom(1)])?
        .compact()?
        .tensor;
    let tokens = Extent::Is(indptr.extent(0) - 1);
    let v_out = merged(args.v_out, v.dtype(), &[tokens, heads, dim], device)?;
    let s_out = optional_lse("s_out", args.s_out, &[tokens, heads], device)?;
    // Numbers on the host are checked one by one; on a device the kernel keeps within the states.
    if let Some(offsets) = indptr.as_i32() {
        rising("indptr", offsets, v.extent(0), "states")?;
    }
    let checked = Checked::new(MergeVarlenArgs {
        v,
        s,
        indptr,
        v_out,
        s_out,
        lse_base: args.lse_base,
        o_scale: output_scale(args.o_scale, v_out.dtype())?,
    });
    context.backend().merge_varlen(&checked, stream)
}

/// The lse of states.
fn lse(name: &str, tensor: Tensor, extents: &[Extent], device: Device) -> Result<Tensor> {
    let lse = named(name, tensor).on(device)?.one_of(&FLOATS)?;
    Ok(lse.shaped(extents)?.tensor)
}

/// The output of states of a type.
fn merged(v_out: Tensor, states: DType, extents: &[Extent], device: Device) -> Result<Tensor> {
    let v_out = named("v_out", v_out)
        .on(device)?
        .one_of(&[states, DType::F8E4M3, DType::F8E5M2])?
        .shaped(extents)?
        .unit_last_stride()?
        .writable()?;
    Ok(v_out.tensor)
}
