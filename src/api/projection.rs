//! The projections of MLA: the checks, and the calls of the backend. Each operator is one or two products per head.

use super::Context;
use super::check::{Extent, FLOATS, Named};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    AbsorbQArgs, AbsorbWeightsArgs, Checked, CopyWeightsArgs, ProjectArgs, ProjectOArgs,
    UpProjectArgs,
};
use crate::tensor::{Device, Tensor};

/// What every width is a multiple of.
const WIDTH: i64 = 8;

/// Takes queries to the latent space.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn absorb_q(context: &Context, args: &AbsorbQArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let checked = product(
        context.device(),
        ("q_nope", args.q_nope),
        ("w_uk", args.w_uk),
        ("q_latent", args.q_latent),
    )?;
    context.backend().project(&checked, stream)
}

/// Takes attention's output from the latent space to that of the values.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn project_o(context: &Context, args: &ProjectOArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let checked = product(
        context.device(),
        ("o_latent", args.o_latent),
        ("w_uv", args.w_uv),
        ("out", args.out),
    )?;
    context.backend().project(&checked, stream)
}

/// Takes latent rows to the keys and values of every head.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn up_project(context: &Context, args: &UpProjectArgs, stream: Stream) -> Result<()> {
    up_project_existing(context, args, None, stream)
}

/// The same of as many rows as a number in the device's memory says; what the others come to is not wanted.
pub(super) fn up_project_existing(
    context: &Context,
    args: &UpProjectArgs,
    existing_tokens: Option<&Tensor>,
    stream: Stream,
) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let kv_c = activations("kv_c", args.kv_c, 2, device)?;
    let keys = pair(("w_uk", args.w_uk), ("k_nope", args.k_nope))?;
    let values = pair(("w_uv", args.w_uv), ("v", args.v))?;
    if keys.is_none() && values.is_none() {
        return Err(Error::InvalidArgument(
            "k_nope, v: NULL is not accepted for both; a tensor for one of them is".into(),
        ));
    }
    let [any, latent] = [Extent::CountFrom(1), Extent::Is(kv_c.extent(1))];
    let keys = keys
        .map(|(w_uk, k_nope)| {
            let w_uk = weight("w_uk", w_uk, [any, any, latent], kv_c.dtype(), device)?;
            rows_of_heads(kv_c, w_uk.swap_dims(1, 2), ("k_nope", k_nope), device)
        })
        .transpose()?;
    let heads = keys.map_or(any, |keys| Extent::Is(keys.weight.extent(0)));
    let values = values
        .map(|(w_uv, v)| {
            let w_uv = weight("w_uv", w_uv, [heads, latent, any], kv_c.dtype(), device)?;
            rows_of_heads(kv_c, w_uv, ("v", v), device)
        })
        .transpose()?;
    match (keys, values) {
        (Some(keys), Some(values)) => {
            let backend = context.backend();
            backend.project_pair(&[keys, values], existing_tokens, stream)
        }
        (one, other) => one.or(other).map_or(Ok(()), |product| {
            context.backend().project(&product, stream)
        }),
    }
}

/// Cuts the up-projection into the weights of the other operators.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn absorb_weights(context: &Context, args: &AbsorbWeightsArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    let device = context.device();
    let from = Named {
        name: "kv_b_proj",
        tensor: args.kv_b_proj,
    }
    .on(device)?
    .one_of(&FLOATS)?
    .shaped(&[Extent::CountFrom(1), Extent::CountFrom(WIDTH)])?;
    multiple_of_width(from, 1)?;
    let from = from.tensor;
    let (any, latent) = (Extent::CountFrom(1), Extent::Is(from.extent(1)));
    let w_uk = args
        .w_uk
        .map(|w_uk| target("w_uk", w_uk, [any, any, latent], &from))
        .transpose()?;
    let heads = w_uk.map_or(any, |w_uk| Extent::Is(w_uk.extent(0)));
    let w_uv = args
        .w_uv
        .map(|w_uv| target("w_uv", w_uv, [heads, latent, any], &from))
        .transpose()?;
    let parts = parts(&from, w_uk, w_uv)?;
    for part in parts.iter().flatten() {
        context.backend().copy_weights(part, stream)?;
    }
    Ok(())
}

type NamedTensor<'a> = (&'a str, Tensor);

/// `x`, weight and output of a product where each head has its own rows.
fn product(
    device: Device,
    (x_name, x): NamedTensor<'_>,
    (weight_name, w): NamedTensor<'_>,
    out: NamedTensor<'_>,
) -> Result<Checked<ProjectArgs>> {
    let x = activations(x_name, x, 3, device)?;
    let extents = [
        Extent::Is(x.extent(1)),
        Extent::Is(x.extent(2)),
        Extent::CountFrom(1),
    ];
    let weight = weight(weight_name, w, extents, x.dtype(), device)?;
    let out = output(out, &x, &weight, device)?;
    Ok(Checked::new(ProjectArgs { x, weight, out }))
}

/// A product where all heads share the rows of `latent`.
fn rows_of_heads(
    latent: Tensor,
    weight: Tensor,
    out: NamedTensor<'_>,
    device: Device,
) -> Result<Checked<ProjectArgs>> {
    let out = output(out, &latent, &weight, device)?;
    let x = latent.insert_dim(1);
    Ok(Checked::new(ProjectArgs { x, weight, out }))
}

fn activations(name: &str, tensor: Tensor, rank: usize, device: Device) -> Result<Tensor> {
    let x = Named { name, tensor }
        .on(device)?
        .one_of(&FLOATS)?
        .shaped(&[Extent::CountFrom(0); 3][..rank])?
        .unit_last_stride()?;
    multiple_of_width(x, rank - 1)?;
    Ok(x.tensor)
}

fn weight(
    name: &str,
    tensor: Tensor,
    extents: [Extent; 3],
    dtype: DType,
    device: Device,
) -> Result<Tensor> {
    let weight = Named { name, tensor }
        .on(device)?
        .of(dtype)?
        .shaped(&extents)?;
    multiple_of_width(weight, 1)?;
    multiple_of_width(weight, 2)?;
    Ok(weight.tensor)
}

fn output(
    (name, tensor): NamedTensor<'_>,
    x: &Tensor,
    weight: &Tensor,
    device: Device,
) -> Result<Tensor> {
    let extents = [x.extent(0), weight.extent(0), weight.extent(2)].map(Extent::Is);
    let out = Named { name, tensor }
        .on(device)?
        .of(x.dtype())?
        .shaped(&extents)?
        .unit_last_stride()?
        .writable()?;
    Ok(out.tensor)
}

/// A weight that is written: of the source's type, or of any where the source is fp32.
fn target(name: &str, tensor: Tensor, extents: [Extent; 3], source: &Tensor) -> Result<Tensor> {
    let types: &[DType] = match source.dtype() {
        DType::F32 => &FLOATS,
        _ => &[source.dtype()],
    };
    let target = Named { name, tensor }
        .on(source.device())?
        .one_of(types)?
        .shaped(&extents)?
        .writable()?;
    multiple_of_width(target, 1)?;
    multiple_of_width(target, 2)?;
    Ok(target.tensor)
}

/// The copies that fill `w_uk` and `w_uv`. Where one is left out, its rows are what the other leaves of a head.
fn parts(
    from: &Tensor,
    w_uk: Option<Tensor>,
    w_uv: Option<Tensor>,
) -> Result<[Option<Checked<CopyWeightsArgs>>; 2]> {
    let Some(heads) = w_uk.or(w_uv).map(|weight| weight.extent(0)) else {
        return Err(Error::InvalidArgument(
            "w_uk, w_uv: NULL is not accepted for both; a tensor for one of them is".into(),
        ));
    };
    let (rows, per_head) = (from.extent(0), from.extent(0) / heads);
    let nope = w_uk.map_or_else(
        || per_head - w_uv.map_or(0, |w_uv| w_uv.extent(2)),
        |w_uk| w_uk.extent(1),
    );
    let value = w_uv.map_or(per_head - nope, |w_uv| w_uv.extent(2));
    // Where one of them is left out it may have no rows, but not fewer.
    if nope < 0 || value < 0 || nope + value != per_head || per_head * heads != rows {
        return Err(Error::Shape(format!(
            "kv_b_proj: {rows} rows are not accepted; num_heads ({heads}) times the rows of w_uk[h] ({}) and the columns of w_uv[h] ({}) are",
            extent_or_any(w_uk, 1),
            extent_or_any(w_uv, 2)
        )));
    }
    let heads = from.split_dim(0, per_head);
    let copy = |first, count, target| {
        let source = heads.narrow(1, first, count);
        Checked::new(CopyWeightsArgs { source, target })
    };
    Ok([
        w_uk.map(|w_uk| copy(0, nope, w_uk)),
        w_uv.map(|w_uv| copy(nope, value, w_uv.swap_dims(1, 2))),
    ])
}

fn extent_or_any(tensor: Option<Tensor>, dim: usize) -> String {
    tensor.map_or("any".into(), |tensor| tensor.extent(dim).to_string())
}

/// A weight and its output are there together, or neither is.
fn pair(
    (weight_name, weight): (&str, Option<Tensor>),
    (out_name, out): (&str, Option<Tensor>),
) -> Result<Option<(Tensor, Tensor)>> {
    match (weight, out) {
        (Some(weight), Some(out)) => Ok(Some((weight, out))),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(one_without_the_other(weight_name, out_name)),
        (Some(_), None) => Err(one_without_the_other(out_name, weight_name)),
    }
}

fn one_without_the_other(absent: &str, present: &str) -> Error {
    Error::InvalidArgument(format!(
        "{absent}: NULL is not accepted where {present} is given; a tensor is"
    ))
}

fn multiple_of_width(named: Named<'_>, dim: usize) -> Result<()> {
    let extent = named.tensor.extent(dim);
    if extent > 0 && extent % WIDTH == 0 {
        return Ok(());
    }
    Err(Error::Shape(format!(
        "{}: extent {extent} of dimension {dim} is not accepted; a multiple of {WIDTH} is",
        named.name
    )))
}
