//! Norm, RoPE and append of new tokens in one call: the checks, and the call of the backend.

use super::Context;
use super::append::checked_append;
use super::check::{Extent, Named, finite};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::{
    Angles, Checked, Frequencies, Llama3Scaling, MOST_ROW_ELEMENTS, Norm, Rope, RopeAppendArgs,
};
use crate::tensor::{Device, Tensor};

/// Normalises and rotates queries and keys of new tokens, and writes keys and values to a paged cache.
///
/// # Errors
/// What is wrong with the arguments; then nothing was written.
pub fn rope_append(context: &Context, args: &RopeAppendArgs, stream: Stream) -> Result<()> {
    context.check_stream(stream)?;
    context
        .backend()
        .rope_append(&checked(args, context.device())?, stream)
}

/// Checks the arguments.
pub(super) fn checked(args: &RopeAppendArgs, device: Device) -> Result<Checked<RopeAppendArgs>> {
    let append = checked_append(&args.append, device)?;
    let rows = Rows {
        device,
        dtype: append.key.dtype(),
        tokens: append.slot_mapping.extent(0),
        dim: append.key.extent(2),
    };
    if rows.dim > MOST_ROW_ELEMENTS as i64 {
        return Err(Error::Shape(format!(
            "key: shape {:?} is not accepted; rows of up to {MOST_ROW_ELEMENTS} elements are",
            append.key.shape()
        )));
    }
    let key_out = match args.key_out {
        None => None,
        Some(out) => {
            let heads = Extent::Is(append.key.extent(1));
            let out = rows.heads("key_out", out, Extent::AtLeast(rows.tokens), heads)?;
            Some(out.writable()?.tensor)
        }
    };
    let (q, q_out) = rows.queries(args)?;
    let num_rows = q.map_or(rows.tokens, |q| q.extent(0));
    let rope = match &args.rope {
        None => None,
        Some(rope) => Some(rows.rope(rope, num_rows)?),
    };
    Ok(Checked::new(RopeAppendArgs {
        append,
        key_out,
        q,
        q_out,
        norm: rows.norm(&args.norm, q.is_some())?,
        rope,
    }))
}

/// What rows of queries and keys have in common.
struct Rows {
    device: Device,
    dtype: DType,
    /// That are appended.
    tokens: i64,
    dim: i64,
}

impl Rows {
    fn heads<'a>(
        &self,
        name: &'a str,
        tensor: Tensor,
        rows: Extent,
        heads: Extent,
    ) -> Result<Named<'a>> {
        Named { name, tensor }
            .on(self.device)?
            .of(self.dtype)?
            .shaped(&[rows, heads, Extent::Is(self.dim)])?
            .unit_last_stride()
    }

    /// Queries, and where they go.
    fn queries(&self, args: &RopeAppendArgs) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(q) = args.q else {
            return match args.q_out {
                None => Ok((None, None)),
                Some(_) => Err(Error::InvalidArgument(
                    "q_out: a tensor is not accepted without q; NULL is".into(),
                )),
            };
        };
        let rows = Extent::CountFrom(self.tokens);
        let q = self.heads("q", q, rows, Extent::CountFrom(0))?;
        let [num_rows, heads] = [0, 1].map(|dim| q.tensor.extent(dim));
        let out = match args.q_out {
            None => q,
            Some(out) => self.heads("q_out", out, Extent::AtLeast(num_rows), Extent::Is(heads))?,
        };
        Ok((Some(q.tensor), Some(out.writable()?.tensor)))
    }

    fn norm(&self, norm: &Norm, has_queries: bool) -> Result<Norm> {
        if norm.q_weight.is_some() && !has_queries {
            return Err(Error::InvalidArgument(
                "q_norm_weight: a tensor is not accepted without q; NULL is".into(),
            ));
        }
        let weight = |name, weight: Option<Tensor>| match weight {
            None => Ok(None),
            Some(tensor) => Named { name, tensor }
                .on(self.device)?
                .one_of(&[DType::F32, self.dtype])?
                .shaped(&[Extent::Is(self.dim)])?
                .unit_last_stride()
                .map(|weight| Some(weight.tensor)),
        };
        let eps = finite("rms_norm_eps", norm.eps)?;
        let has_weight = norm.q_weight.is_some() || norm.k_weight.is_some();
        match has_weight {
            true if eps <= 0.0 => Err(Error::InvalidArgument(format!(
                "rms_norm_eps: {eps} is not accepted with q_norm_weight or k_norm_weight; a positive number is"
            ))),
            false if eps != 0.0 => Err(Error::InvalidArgument(format!(
                "rms_norm_eps: {eps} is not accepted without q_norm_weight and k_norm_weight; 0 is"
            ))),
            _ => Ok(Norm {
                q_weight: weight("q_norm_weight", norm.q_weight)?,
                k_weight: weight("k_norm_weight", norm.k_weight)?,
                eps,
            }),
        }
    }

    fn rope(&self, rope: &Rope, num_rows: i64) -> Result<Rope> {
        let integers = |name, tensor| {
            Named { name, tensor }
                .on(self.device)?
                .one_of(&[DType::I32, DType::I64])?
                .shaped(&[Extent::AtLeast(num_rows)])?
                .compact()
        };
        let (angles, rotary_dim) = match rope.angles {
            Angles::Table(table) => self.table(table, rope.rotary_dim)?,
            Angles::Computed(frequencies) => {
                let dim = match rope.rotary_dim {
                    0 => self.dim,
                    dim => i64::from(dim),
                };
                (Angles::Computed(checked_frequencies(&frequencies)?), dim)
            }
        };
        if rotary_dim % 2 != 0 || !(2..=self.dim).contains(&rotary_dim) {
            return Err(Error::InvalidArgument(format!(
                "rotary_dim: {rotary_dim} is not accepted; an even number from 2 to {}, the elements of a row, is",
                self.dim
            )));
        }
        let checked = Rope {
            positions: integers("positions", rope.positions)?.tensor,
            position_offsets: match rope.position_offsets {
                None => None,
                Some(offsets) => Some(integers("position_offsets", offsets)?.tensor),
            },
            angles,
            rotary_dim: rotary_dim as u32,
            ..*rope
        };
        if let Angles::Table(table) = angles {
            check_positions(&checked, num_rows, table.extent(1))?;
        }
        Ok(checked)
    }

    /// A table as `[2, max_position, pairs]`, and the elements that it rotates.
    fn table(&self, table: Tensor, rotary_dim: u32) -> Result<(Angles, i64)> {
        let named = Named {
            name: "cos_sin_cache",
            tensor: table,
        };
        let stated = |pairs: i64| match rotary_dim {
            0 => Extent::CountFrom(1),
            dim => Extent::Is(i64::from(dim) / 2 * pairs),
        };
        let named = named.on(self.device)?.one_of(&[DType::F32, self.dtype])?;
        let positions = Extent::CountFrom(1);
        let named = match table.rank() {
            3 => named.shaped(&[Extent::Is(2), positions, stated(1)])?,
            _ => named.shaped(&[positions, stated(2)])?,
        };
        let table = named.unit_last_stride()?.tensor;
        if table.rank() == 3 {
            return Ok((Angles::Table(table), 2 * table.extent(2)));
        }
        let dim = table.extent(1);
        if dim % 2 != 0 {
            return Err(Error::Shape(format!(
                "cos_sin_cache: shape {:?} is not accepted; an even last dimension is",
                table.shape()
            )));
        }
        let planes = table.split_dim(1, dim / 2).swap_dims(0, 1);
        Ok((Angles::Table(planes), dim))
    }
}

fn checked_frequencies(stated: &Frequencies) -> Result<Frequencies> {
    positive("rope_theta", stated.theta)?;
    let scale = match stated.scale {
        0.0 => 1.0,
        scale => positive("rope_scale", scale)?,
    };
    if let Some(llama3) = stated.llama3 {
        check_llama3(&llama3)?;
    }
    Ok(Frequencies { scale, ..*stated })
}

fn check_llama3(llama3: &Llama3Scaling) -> Result<()> {
    let low = positive("low_freq_factor", llama3.low_freq_factor)?;
    let high = positive("high_freq_factor", llama3.high_freq_factor)?;
    if high <= low {
        return Err(Error::InvalidArgument(format!(
            "high_freq_factor: {high} is not accepted; a number above low_freq_factor ({low}) is"
        )));
    }
    if llama3.old_context_len == 0 {
        return Err(Error::InvalidArgument(
            "old_context_len: 0 is not accepted with low_freq_factor and high_freq_factor; 1 or more is"
                .into(),
        ));
    }
    Ok(())
}

fn positive(name: &str, value: f32) -> Result<f32> {
    if finite(name, value)? > 0.0 {
        return Ok(value);
    }
    Err(Error::InvalidArgument(format!(
        "{name}: {value} is not accepted; a positive number is"
    )))
}

/// Positions on the host are checked one by one; on a device the kernel takes the nearest one that the table has.
fn check_positions(rope: &Rope, num_rows: i64, max_position: i64) -> Result<()> {
    let Some(positions) = rope.positions.as_integers() else {
        return Ok(());
    };
    let offsets = rope.position_offsets.as_ref().and_then(Tensor::as_integers);
    for row in 0..num_rows as usize {
        let (position, offset) = (positions.get(row), offsets.map_or(0, |all| all.get(row)));
        let at = position.checked_add(offset);
        if !at.is_some_and(|at| (0..max_position).contains(&at)) {
            let with_offset = match offsets {
                None => String::new(),
                Some(_) => format!(" with position_offsets[{row}] ({offset})"),
            };
            return Err(Error::InvalidArgument(format!(
                "positions[{row}]: {position}{with_offset} is not accepted; 0 or more and below the rows of cos_sin_cache ({max_position}) is"
            )));
        }
    }
    Ok(())
}
