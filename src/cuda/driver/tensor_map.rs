//! Tensor maps: how the tensor memory accelerator of Hopper sees a strided array. Encoding is host
//! arithmetic in the driver, about a microsecond; it neither allocates nor touches the array.
#![allow(unsafe_code)]

use std::ffi::c_void;

use super::library::Driver;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// Most dimensions of a map.
pub const MAX_MAP_RANK: usize = 5;

/// An encoded map, passed to kernels by value as `const __grid_constant__ CUtensorMap`.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap([u64; 16]);

/// How bytes of a box are permuted in shared memory, so that column reads meet different banks. The
/// inner extent of a box may not exceed the span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    /// Row-major.
    None = 0,
    /// 32-byte span.
    Span32 = 1,
    /// 64-byte span.
    Span64 = 2,
    /// 128-byte span.
    Span128 = 3,
}

/// How much is brought to L2 around each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum L2Promotion {
    /// What was asked for.
    None = 0,
    /// 64 bytes.
    Bytes64 = 1,
    /// 128 bytes.
    Bytes128 = 2,
    /// 256 bytes.
    Bytes256 = 3,
}

/// A strided array in device memory and the box that one copy moves. Dimension 0 is the innermost and
/// has unit stride. Elements outside the extents read as zero. The driver's `interleave` is for image
/// formats and its NaN fill for debugging: both stay off.
#[derive(Debug, Clone, Copy)]
pub struct Tiled<'a> {
    /// Element type; fp8 moves as bytes.
    pub dtype: DType,
    /// Device address, a multiple of 16.
    pub address: u64,
    /// Elements along each dimension.
    pub extents: &'a [u64],
    /// Bytes from one index to the next of dimensions 1 and up: multiples of 16 below 2^40.
    pub strides: &'a [u64],
    /// Elements of a box along each dimension, at most 256.
    pub box_extents: &'a [u32],
    /// Every how many elements one is copied along each dimension, 1 to 8.
    pub element_strides: &'a [u32],
    /// Permutation in shared memory.
    pub swizzle: Swizzle,
    /// Prefetch granularity.
    pub l2_promotion: L2Promotion,
}

impl TensorMap {
    /// Encodes a map.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming what the hardware cannot do, [`Error::Driver`] for what only the
    /// driver knows.
    pub fn encode(driver: Driver, tiled: &Tiled<'_>) -> Result<TensorMap> {
        tiled.check()?;
        let mut map = TensorMap([0; 16]);
        // SAFETY: the arrays hold `rank` (strides: rank - 1) elements, which `check` made sure of; the
        // map is writable and aligned. The array itself is not read.
        let code = unsafe {
            (driver.symbols().cuTensorMapEncodeTiled)(
                map.0.as_mut_ptr().cast(),
                data_type(tiled.dtype),
                tiled.extents.len() as u32,
                tiled.address as *mut c_void,
                tiled.extents.as_ptr(),
                tiled.strides.as_ptr(),
                tiled.box_extents.as_ptr(),
                tiled.element_strides.as_ptr(),
                0,
                tiled.swizzle as u32,
                tiled.l2_promotion as u32,
                0,
            )
        };
        driver.check("cuTensorMapEncodeTiled", code)?;
        Ok(map)
    }
}

impl Tiled<'_> {
    fn check(&self) -> Result<()> {
        let rank = self.extents.len();
        let lengths = [
            self.strides.len() + 1,
            self.box_extents.len(),
            self.element_strides.len(),
        ];
        if !(1..=MAX_MAP_RANK).contains(&rank) || lengths != [rank; 3] {
            return refuse(format!(
                "rank {rank} with {} strides, {} box extents and {} element strides; \
                 1 to {MAX_MAP_RANK} dimensions with one stride less are accepted",
                self.strides.len(),
                self.box_extents.len(),
                self.element_strides.len()
            ));
        }
        if !self.address.is_multiple_of(16) {
            return refuse(format!(
                "address {:#x}; multiples of 16 are accepted",
                self.address
            ));
        }
        if let Some(extent) = self.extents.iter().find(|&&e| e == 0 || e > 1 << 32) {
            return refuse(format!("extent {extent}; 1 to 2^32 are accepted"));
        }
        if let Some(stride) = self.strides.iter().find(|&&s| s % 16 != 0 || s >= 1 << 40) {
            return refuse(format!(
                "stride {stride} bytes; multiples of 16 below 2^40 are accepted"
            ));
        }
        if let Some(extent) = self.box_extents.iter().find(|&&e| !(1..=256).contains(&e)) {
            return refuse(format!("box extent {extent}; 1 to 256 are accepted"));
        }
        if let Some(step) = self
            .element_strides
            .iter()
            .find(|&&s| !(1..=8).contains(&s))
        {
            return refuse(format!("element stride {step}; 1 to 8 are accepted"));
        }
        self.check_inner_box()
    }

    fn check_inner_box(&self) -> Result<()> {
        let bytes = self.box_extents[0] as usize * self.dtype.size();
        let most = match self.swizzle {
            Swizzle::None => 256 * self.dtype.size(),
            Swizzle::Span32 => 32,
            Swizzle::Span64 => 64,
            Swizzle::Span128 => 128,
        };
        if !bytes.is_multiple_of(16) || bytes > most {
            return refuse(format!(
                "{bytes} bytes along the inner extent of a box; multiples of 16 up to {most} are \
                 accepted with this swizzle"
            ));
        }
        Ok(())
    }
}

fn refuse<T>(what: String) -> Result<T> {
    Err(Error::InvalidArgument(format!("tensor map: {what}")))
}

/// `CUtensorMapDataType` by its numbers in `cuda.h`. The type matters for nothing but its size here.
fn data_type(dtype: DType) -> u32 {
    match (dtype, dtype.size()) {
        (DType::F16, _) => 6,
        (DType::F32, _) => 7,
        (DType::BF16, _) => 9,
        (_, 1) => 0,
        (_, 2) => 1,
        (_, 4) => 2,
        _ => 4,
    }
}
