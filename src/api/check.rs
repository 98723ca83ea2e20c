//! Checks that several operators share. Each failure is one sentence: field, value, what is accepted.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::tensor::{Device, Integers, Tensor};
use std::fmt::Display;

/// Types that attention computes with, and that an lse may have.
pub(super) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Types of lengths, offsets, pages, slots and positions.
pub(super) const INTEGERS: [DType; 2] = [DType::I32, DType::I64];

/// A tensor under its field's name.
#[derive(Clone, Copy)]
pub(super) struct Named<'a> {
    pub name: &'a str,
    pub tensor: Tensor,
}

pub(super) fn named(name: &str, tensor: Tensor) -> Named<'_> {
    Named { name, tensor }
}

/// Most of what is counted in 32 bits: heads, states, tokens of a page.
const MAX_COUNT: i64 = i32::MAX as i64;

/// What a dimension must be.
#[derive(Clone, Copy)]
pub(super) enum Extent {
    /// Exactly this.
    Is(i64),
    /// This or more.
    AtLeast(i64),
    /// From this up to [`MAX_COUNT`].
    CountFrom(i64),
    /// Whatever.
    Any,
}

impl Display for Extent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Extent::Is(n) => write!(f, "{n}"),
            Extent::AtLeast(n) => write!(f, "{n} or more"),
            Extent::CountFrom(n) => write!(f, "{n} to {MAX_COUNT}"),
            Extent::Any => f.write_str("any"),
        }
    }
}

/// Wraps a tensor that may not be absent.
pub(super) fn required<'a>(name: &'a str, tensor: Option<Tensor>) -> Result<Named<'a>> {
    match tensor {
        Some(tensor) => Ok(Named { name, tensor }),
        None => Err(Error::InvalidArgument(format!(
            "{name}: NULL is not accepted; a tensor is"
        ))),
    }
}

impl Named<'_> {
    pub fn on(self, device: Device) -> Result<Self> {
        if self.tensor.device() == device {
            return Ok(self);
        }
        Err(Error::DeviceMismatch(format!(
            "{}: the tensor is on {}, the context on {device}",
            self.name,
            self.tensor.device()
        )))
    }

    pub fn of(self, dtype: DType) -> Result<Self> {
        // Hosts often carry pages of few bits as plain bytes.
        if dtype.may_be_bytes() && self.tensor.dtype() == DType::U8 {
            return Ok(Named {
                tensor: self.tensor.with_dtype(dtype),
                ..self
            });
        }
        self.one_of(&[dtype])
    }

    pub fn one_of(self, dtypes: &[DType]) -> Result<Self> {
        if dtypes.contains(&self.tensor.dtype()) {
            return Ok(self);
        }
        let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
        Err(Error::DType(format!(
            "{}: dtype {} is not accepted; {} is",
            self.name,
            self.tensor.dtype(),
            names.join(" or ")
        )))
    }

    pub fn shaped(self, extents: &[Extent]) -> Result<Self> {
        let fits = self.tensor.rank() == extents.len()
            && extents
                .iter()
                .zip(self.tensor.shape())
                .all(|(want, &is)| match *want {
                    Extent::Is(n) => is == n,
                    Extent::AtLeast(n) => is >= n,
                    Extent::CountFrom(n) => (n..=MAX_COUNT).contains(&is),
                    Extent::Any => true,
                });
        if fits {
            return Ok(self);
        }
        let wanted: Vec<String> = extents.iter().map(Extent::to_string).collect();
        Err(Error::Shape(format!(
            "{}: shape {:?} is not accepted; [{}] is",
            self.name,
            self.tensor.shape(),
            wanted.join(", ")
        )))
    }

    /// The last dimension's elements lie side by side.
    pub fn unit_last_stride(self) -> Result<Self> {
        let last = self.tensor.rank() - 1;
        if self.tensor.stride(last) == 1 || self.tensor.extent(last) <= 1 {
            return Ok(self);
        }
        Err(Error::Shape(format!(
            "{}: stride {} of the last dimension is not accepted; 1 is",
            self.name,
            self.tensor.stride(last)
        )))
    }

    pub fn compact(self) -> Result<Self> {
        if self.tensor.is_compact() {
            return Ok(self);
        }
        Err(Error::Shape(format!(
            "{}: strides {:?} of shape {:?} are not accepted; a contiguous tensor is",
            self.name,
            self.tensor.strides(),
            self.tensor.shape()
        )))
    }

    /// An output may not name an element twice.
    pub fn writable(self) -> Result<Self> {
        if self.tensor.is_empty() || self.tensor.is_injective() {
            return Ok(self);
        }
        Err(Error::Shape(format!(
            "{}: strides {:?} of shape {:?} make elements overlap; an output needs elements of its own",
            self.name,
            self.tensor.strides(),
            self.tensor.shape()
        )))
    }
}

/// An output that holds an lse, where the caller wants one.
pub(super) fn optional_lse(
    name: &str,
    tensor: Option<Tensor>,
    extents: &[Extent],
    device: Device,
) -> Result<Option<Tensor>> {
    let Some(tensor) = tensor else {
        return Ok(None);
    };
    let lse = named(name, tensor).on(device)?.one_of(&FLOATS)?;
    Ok(Some(lse.shaped(extents)?.writable()?.tensor))
}

/// `value`, or 1 where the caller left it 0; finite.
pub(super) fn scale(name: &str, value: f32) -> Result<f32> {
    finite(name, value).map(|value| if value == 0.0 { 1.0 } else { value })
}

pub(super) fn finite(name: &str, value: f32) -> Result<f32> {
    if value.is_finite() {
        return Ok(value);
    }
    Err(Error::InvalidArgument(format!(
        "{name}: {value} is not accepted; a finite number is"
    )))
}

/// Largest factor on an output, and the reciprocal of its smallest divisor: their product is a float32 number,
/// and what sees nothing is 0 times it.
pub(super) const MOST_OUTPUT_SCALE: f32 = (1u64 << 60) as f32;

/// The divisor of an output, which only one in fp8 has.
pub(super) fn output_scale(o_scale: f32, output: DType) -> Result<f32> {
    let o_scale = scale("o_scale", o_scale)?;
    if o_scale != 1.0 && !output.is_fp8() {
        return Err(Error::InvalidArgument(format!(
            "o_scale: {o_scale} is not accepted with an output of {output}; only fp8 outputs are scaled"
        )));
    }
    if (1.0 / MOST_OUTPUT_SCALE..=MOST_OUTPUT_SCALE).contains(&o_scale) {
        return Ok(o_scale);
    }
    Err(Error::InvalidArgument(format!(
        "o_scale: {o_scale:e} is not accepted; 0 (for 1) or 2^-60 to 2^60 is"
    )))
}

/// Offsets into so many rows: none is below the one before it.
pub(super) fn rising<'a>(
    name: &str,
    offsets: impl Into<Integers<'a>>,
    rows: i64,
    what: impl Display,
) -> Result<()> {
    let mut before = 0;
    for (at, offset) in offsets.into().iter().enumerate() {
        if offset < before || offset > rows {
            return Err(Error::InvalidArgument(format!(
                "{name}[{at}]: {offset} is not accepted; {before}, the value before it or 0, to {rows}, the {what}, is"
            )));
        }
        before = offset;
    }
    Ok(())
}

/// A factor for each KV head of each request, for each KV head, or one for all. Where a tensor of requests' scales was
/// expanded from fewer, backends get those.
pub(super) fn request_scales(
    name: &str,
    scales: Option<Tensor>,
    [batch_size, num_kv_heads]: [i64; 2],
    device: Device,
) -> Result<Option<Tensor>> {
    match scales {
        Some(tensor) if tensor.rank() == 2 => {
            let scales = Named { name, tensor }.on(device)?.of(DType::F32)?;
            let shape = [Extent::Is(batch_size), Extent::Is(num_kv_heads)];
            let scales = scales.shaped(&shape)?;
            match expanded_from(scales.tensor) {
                Some(fewer) => head_scales(name, Some(fewer), num_kv_heads, device),
                None => Ok(Some(scales.compact()?.tensor)),
            }
        }
        _ => head_scales(name, scales, num_kv_heads, device),
    }
}

/// The row, or the number, that all rows of scales are by their strides. (A stride of one row says nothing.)
fn expanded_from(scales: Tensor) -> Option<Tensor> {
    let [num_rows, num_heads] = [scales.extent(0), scales.extent(1)];
    let is_number = num_heads > 1 && scales.stride(1) == 0;
    let is_row = num_rows > 0 && scales.stride(0) == 0 || num_rows == 1 && is_number;
    let row = is_row.then(|| scales.narrow(0, 0, 1).remove_dim(0))?;
    Some(if is_number { row.narrow(0, 0, 1) } else { row })
}

/// The divisor of an fp8 output that is known at run only.
pub(super) fn output_scales(
    scales: Option<Tensor>,
    output: DType,
    device: Device,
) -> Result<Option<Tensor>> {
    let Some(tensor) = scales else {
        return Ok(None);
    };
    if !output.is_fp8() {
        return Err(Error::InvalidArgument(format!(
            "o_scales: a tensor is not accepted with an output of {output}; only fp8 outputs are scaled"
        )));
    }
    let scales = named("o_scales", tensor).on(device)?.of(DType::F32)?;
    Ok(Some(scales.shaped(&[Extent::Is(1)])?.tensor))
}

/// A factor per KV head, or one for all.
pub(super) fn head_scales(
    name: &str,
    scales: Option<Tensor>,
    num_kv_heads: i64,
    device: Device,
) -> Result<Option<Tensor>> {
    let Some(tensor) = scales else {
        return Ok(None);
    };
    let scales = Named { name, tensor }.on(device)?.of(DType::F32)?;
    if tensor.rank() == 1 && [1, num_kv_heads].contains(&tensor.extent(0)) {
        return Ok(Some(scales.compact()?.tensor));
    }
    Err(Error::Shape(format!(
        "{name}: shape {:?} is not accepted; [1] or [{num_kv_heads}] is",
        tensor.shape()
    )))
}
