//! A checked description of memory: address, device, element type, extents and strides.
//!
//! This is where raw pointers die. [`Tensor::new`] checks what can be checked without knowing the
//! operator (NULL, alignment, overflow); the `api` layer checks what each operator wants. It is not an
//! array library: nothing here allocates or computes. The same memory described otherwise is `views.rs`, and what it holds
//! is `elements.rs`.

mod elements;
mod integers;
mod views;

pub use integers::Integers;

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Most dimensions any Folio tensor has.
pub const MAX_RANK: usize = 5;

/// Elements from one index to the next in any memory there is: today's processors address 2^57 bytes at most.
const LONGEST_STRIDE: i64 = 1 << 48;

/// Where memory lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// Host memory.
    Cpu,
    /// Memory of the CUDA device with this ordinal.
    Cuda(i32),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(id) => write!(f, "cuda:{id}"),
        }
    }
}

/// Borrowed memory with a shape. Copying a `Tensor` copies the description only.
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    address: usize,
    device: Device,
    dtype: DType,
    rank: usize,
    is_page_locked: bool,
    shape: [i64; MAX_RANK],
    strides: [i64; MAX_RANK],
}

impl Tensor {
    /// Describes memory at `data`. `strides` are in elements; `None` means compact row-major.
    /// `name` is the field's name for messages.
    ///
    /// # Errors
    /// [`Error::Shape`] when the rank exceeds [`MAX_RANK`], an extent or stride is negative, the byte
    /// size overflows or the address is not a multiple of the element size;
    /// [`Error::InvalidArgument`] when `data` is null although the tensor has elements.
    ///
    /// # Safety
    /// While any Folio call uses the tensor, or the plan that was made with it, `data` must stay valid
    /// for the described extent: for reads, and for writes where the call documents an output.
    #[allow(unsafe_code)]
    pub unsafe fn new(
        name: &str,
        data: *mut u8,
        device: Device,
        dtype: DType,
        shape: &[i64],
        strides: Option<&[i64]>,
    ) -> Result<Tensor> {
        if shape.len() > MAX_RANK {
            return Err(Error::Shape(format!(
                "{name}: rank {} is not supported; at most {MAX_RANK} dimensions are",
                shape.len()
            )));
        }
        let mut tensor = Tensor {
            address: data as usize,
            device,
            dtype,
            rank: shape.len(),
            is_page_locked: false,
            shape: [1; MAX_RANK],
            strides: [0; MAX_RANK],
        };
        tensor.shape[..shape.len()].copy_from_slice(shape);
        match strides {
            Some(strides) => tensor.strides[..shape.len()].copy_from_slice(strides),
            None => tensor.fill_compact_strides(name)?,
        }
        tensor.check(name)?;
        tensor.drop_unused_strides();
        Ok(tensor)
    }

    fn fill_compact_strides(&mut self, name: &str) -> Result<()> {
        let mut stride = 1i64;
        for dim in (0..self.rank).rev() {
            self.strides[dim] = stride;
            stride = stride
                .checked_mul(self.shape[dim].max(1))
                .ok_or_else(|| overflow(name))?;
        }
        Ok(())
    }

    fn check(&self, name: &str) -> Result<()> {
        for (dim, (&extent, &stride)) in self.shape().iter().zip(self.strides()).enumerate() {
            if extent < 0 || stride < 0 {
                return Err(Error::Shape(format!(
                    "{name}: dimension {dim} has extent {extent} and stride {stride}; both must be 0 or more"
                )));
            }
        }
        if self.is_empty() {
            return Ok(());
        }
        if self.address == 0 {
            return Err(Error::InvalidArgument(format!(
                "{name}: data is NULL although the tensor has elements"
            )));
        }
        if !self.address.is_multiple_of(self.dtype.size()) {
            return Err(Error::Shape(format!(
                "{name}: address {:#x} is not aligned to its element size of {} bytes",
                self.address,
                self.dtype.size()
            )));
        }
        let mut last = 0i64;
        for (&extent, &stride) in self.shape().iter().zip(self.strides()) {
            last = (extent - 1)
                .checked_mul(stride)
                .and_then(|span| last.checked_add(span))
                .ok_or_else(|| overflow(name))?;
        }
        last.checked_add(1)
            .and_then(|n| n.checked_mul(self.dtype.size() as i64))
            .and_then(|bytes| i64::try_from(self.address).ok()?.checked_add(bytes))
            .map(|_| ())
            .ok_or_else(|| overflow(name))
    }

    /// A stride that no index is ever multiplied with may be any number, and such a number times a few bytes
    /// is none any more: strides that no memory is large enough for become 0. Others stay as they are stated.
    fn drop_unused_strides(&mut self) {
        let is_empty = self.is_empty();
        for (stride, extent) in self.strides.iter_mut().zip(self.shape) {
            if *stride > LONGEST_STRIDE && (is_empty || extent <= 1) {
                *stride = 0;
            }
        }
    }

    /// The address of element 0.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Where the memory lives.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The same tensor, whose host memory was page-locked by the CUDA driver, so that kernels may reach it.
    pub fn page_locked(mut self) -> Tensor {
        debug_assert_eq!(self.device, Device::Cpu);
        self.is_page_locked = true;
        self
    }

    /// Whether the memory is the host's and was page-locked by the CUDA driver.
    pub fn is_page_locked(&self) -> bool {
        self.is_page_locked
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Extents.
    pub fn shape(&self) -> &[i64] {
        &self.shape[..self.rank]
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.rank]
    }

    /// Extent of dimension `dim`.
    pub fn extent(&self, dim: usize) -> i64 {
        self.shape[dim]
    }

    /// Stride of dimension `dim`, in elements.
    pub fn stride(&self, dim: usize) -> i64 {
        self.strides[dim]
    }

    /// No elements.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// The number of elements. (Cannot overflow: the constructor checked the span, and zero strides,
    /// which could make the count exceed the span, saturate here.)
    pub fn num_elements(&self) -> i64 {
        self.shape()
            .iter()
            .fold(1i64, |count, &extent| count.saturating_mul(extent))
    }

    /// Row-major without gaps; extents of one may have any stride, and so may all where there is no element.
    pub fn is_compact(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let mut expected = 1i64;
        for dim in (0..self.rank).rev() {
            if self.shape[dim] != 1 && self.strides[dim] != expected {
                return false;
            }
            expected = expected.saturating_mul(self.shape[dim].max(1));
        }
        true
    }

    /// Two different indices never name the same element: what an output needs. (A sufficient rule:
    /// ordered by stride, each dimension must step over all the smaller ones.)
    pub fn is_injective(&self) -> bool {
        let mut dims = [(0, 1); MAX_RANK];
        for (dim, step) in dims.iter_mut().enumerate().take(self.rank) {
            *step = (self.strides[dim], self.shape[dim]);
        }
        dims.sort_unstable();
        let mut reach = 0i64;
        for (stride, extent) in dims.into_iter().filter(|&(_, extent)| extent > 1) {
            if stride <= reach {
                return false;
            }
            reach += stride * (extent - 1);
        }
        true
    }
}

fn overflow(name: &str) -> Error {
    Error::Shape(format!(
        "{name}: extents times strides overflow the address space"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(unsafe_code)]
    fn tensor(shape: &[i64], strides: Option<&[i64]>) -> Result<Tensor> {
        // SAFETY: the tests below never read or write elements.
        unsafe { Tensor::new("x", 64 as *mut u8, Device::Cpu, DType::F32, shape, strides) }
    }

    #[test]
    fn overflowing_extents_are_refused() {
        assert!(matches!(
            tensor(&[1 << 40, 1 << 40], None),
            Err(Error::Shape(_))
        ));
        assert!(matches!(
            tensor(&[2, 2], Some(&[i64::MAX, 1])),
            Err(Error::Shape(_))
        ));
        assert!(matches!(tensor(&[i64::MAX], None), Err(Error::Shape(_))));
        assert!(matches!(tensor(&[-1], None), Err(Error::Shape(_))));
        assert!(matches!(tensor(&[1; 6], None), Err(Error::Shape(_))));
        assert!(tensor(&[0, 1 << 40, 1 << 40], Some(&[1, 1, 1])).is_ok());
    }

    #[test]
    #[allow(unsafe_code)]
    fn memory_ends_at_half_of_all_addresses() {
        let at = |address: usize, count: i64| {
            let data = address as *mut u8;
            // SAFETY: never read or written.
            unsafe { Tensor::new("x", data, Device::Cpu, DType::F32, &[count], None) }
        };
        assert!(at((1 << 63) - 64, 15).is_ok());
        assert!(matches!(at((1 << 63) - 64, 16), Err(Error::Shape(_))));
        assert!(matches!(at(1 << 63, 1), Err(Error::Shape(_))));
        assert!(matches!(at(usize::MAX - 63, 1), Err(Error::Shape(_))));
        assert!(at(1 << 63, 0).is_ok());
    }

    #[test]
    fn strides_that_no_index_is_multiplied_with_may_be_any_number() {
        let strides =
            |shape: &[i64], strides| tensor(shape, Some(strides)).unwrap().strides().to_vec();
        assert_eq!(strides(&[1, 4], &[i64::MAX, 1]), [0, 1]);
        assert_eq!(strides(&[1, 4], &[1 << 48, 1]), [1 << 48, 1]);
        assert_eq!(strides(&[1, 4], &[7, 1]), [7, 1]);
        assert_eq!(strides(&[0, 4, 4], &[i64::MAX, i64::MAX, 1]), [0, 0, 1]);
        assert!(tensor(&[2, 4], Some(&[i64::MAX, 1])).is_err());
    }

    /// As many elements as the tensor has, and as its memory spans.
    #[test]
    fn injective_means_no_shared_element() {
        assert!(tensor(&[4, 8], None).unwrap().is_injective());
        assert!(tensor(&[4, 8], Some(&[16, 1])).unwrap().is_injective());
        assert!(tensor(&[8, 4], Some(&[1, 8])).unwrap().is_injective());
        assert!(!tensor(&[4, 8], Some(&[7, 1])).unwrap().is_injective());
        assert!(!tensor(&[4, 8], Some(&[0, 1])).unwrap().is_injective());
        assert!(tensor(&[1, 8], Some(&[0, 1])).unwrap().is_injective());
    }
}
