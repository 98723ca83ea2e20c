//! Tensors and element types as C describes them, and their translation.

use super::context::{FOLIO_DEVICE_CPU, FOLIO_DEVICE_CUDA, FOLIO_DEVICE_CUDA_HOST};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::problem::LogBase;
use crate::tensor::{Device, MAX_RANK, Tensor};
use std::ffi::c_void;

/// An element type, as DLPack describes it: float is code 2, bfloat 4, float8_e4m3fn 10, float8_e5m2
/// 12, float4_e2m1fn 17, int 0, uint 1, bool 6; lanes is 1, but 2 for types of 4 bits, of which a tensor's element is a pair
/// in a byte. Where a field asks for uint8, bool of 8 bits is accepted as well.
/// All zero means "the default" where a field says so.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct folio_dtype {
    /// DLPack's DLDataTypeCode.
    pub code: u8,
    /// Bits per element.
    pub bits: u8,
    /// 1, or 2 for pairs of 4 bits.
    pub lanes: u16,
}

/// Borrowed memory with a shape; byte for byte a DLTensor of DLPack 1.x. The struct, its shape and its
/// strides are only read during the call that receives them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct folio_tensor {
    /// Address of the allocation; NULL is accepted where an extent is 0.
    pub data: *mut c_void,
    /// FOLIO_DEVICE_CPU, FOLIO_DEVICE_CUDA or FOLIO_DEVICE_CUDA_HOST.
    pub device_type: i32,
    /// Device ordinal.
    pub device_id: i32,
    /// Number of dimensions, at most 5.
    pub ndim: i32,
    /// Element type.
    pub dtype: folio_dtype,
    /// `[ndim]` extents.
    pub shape: *mut i64,
    /// `[ndim]` strides in elements, 0 or more; NULL, which DLPack forbids since 1.2, means compact
    /// row-major.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

const _: () = assert!(size_of::<folio_tensor>() == 48 && size_of::<folio_dtype>() == 4);

impl folio_dtype {
    fn is_default(self) -> bool {
        self.code == 0 && self.bits == 0 && self.lanes == 0
    }

    /// The element type; an error names the field.
    pub(super) fn parse(self, name: &str) -> Result<DType> {
        DType::from_dlpack(self.code, self.bits, self.lanes)
            .map_err(|error| Error::DType(format!("{name}: {error}")))
    }

    /// As `parse`, with all zero standing for `default`.
    pub(super) fn parse_or(self, name: &str, default: DType) -> Result<DType> {
        if self.is_default() {
            Ok(default)
        } else {
            self.parse(name)
        }
    }

    /// As `parse`, with all zero standing for nothing.
    pub(super) fn parse_optional(self, name: &str) -> Result<Option<DType>> {
        if self.is_default() {
            Ok(None)
        } else {
            self.parse(name).map(Some)
        }
    }
}

/// Translates a tensor that may not be NULL.
///
/// # Safety
/// As [`tensor`].
pub(super) unsafe fn required(name: &str, given: *const folio_tensor) -> Result<Tensor> {
    // SAFETY: the caller's promise.
    unsafe { tensor(name, given) }?
        .ok_or_else(|| Error::InvalidArgument(format!("{name}: NULL is not accepted; a tensor is")))
}

/// The base of an lse, given the flag that asks for base 2 or 0.
pub(super) fn log_base(base_2: u32) -> LogBase {
    match base_2 {
        0 => LogBase::E,
        _ => LogBase::Two,
    }
}

/// Translates an optional tensor; NULL is `None`.
///
/// # Safety
/// `tensor` is NULL or points to a struct whose shape and strides hold ndim values each (strides may be
/// NULL), and whose memory is as described for the call.
pub(super) unsafe fn tensor(name: &str, tensor: *const folio_tensor) -> Result<Option<Tensor>> {
    if tensor.is_null() {
        return Ok(None);
    }
    // SAFETY: not NULL, hence readable.
    let tensor = unsafe { tensor.read_unaligned() };
    let device_type = tensor.device_type;
    let device = match device_type {
        FOLIO_DEVICE_CPU | FOLIO_DEVICE_CUDA_HOST => Device::Cpu,
        FOLIO_DEVICE_CUDA => Device::Cuda(tensor.device_id),
        other => {
            return Err(Error::DeviceMismatch(format!(
                "{name}.device_type: {other} is not accepted; FOLIO_DEVICE_CPU (1), FOLIO_DEVICE_CUDA (2) or FOLIO_DEVICE_CUDA_HOST (3) is"
            )));
        }
    };
    let dtype = tensor.dtype.parse(&format!("{name}.dtype"))?;
    let rank = usize::try_from(tensor.ndim)
        .ok()
        .filter(|rank| *rank <= MAX_RANK);
    let rank = rank.ok_or_else(|| {
        Error::Shape(format!(
            "{name}.ndim: {} is not accepted; 0 to {MAX_RANK} is",
            tensor.ndim
        ))
    })?;
    if rank > 0 && tensor.shape.is_null() {
        return Err(Error::InvalidArgument(format!(
            "{name}.shape: NULL is not accepted; {rank} extents are"
        )));
    }
    let (mut shape, mut strides) = ([0; MAX_RANK], [0; MAX_RANK]);
    for dim in 0..rank {
        // SAFETY: shape holds ndim values, and strides too where it is not NULL.
        unsafe {
            shape[dim] = tensor.shape.add(dim).read_unaligned();
            if !tensor.strides.is_null() {
                strides[dim] = tensor.strides.add(dim).read_unaligned();
            }
        }
    }
    let address = (tensor.data as usize)
        .checked_add(usize::try_from(tensor.byte_offset).unwrap_or(usize::MAX))
        .filter(|address| isize::try_from(*address).is_ok())
        .filter(|_| !tensor.data.is_null() || tensor.byte_offset == 0)
        .ok_or_else(|| {
            Error::Shape(format!(
                "{name}.byte_offset: {} beyond data {:?} is not accepted; an offset within the allocation is",
                tensor.byte_offset, tensor.data
            ))
        })?;
    let strides = (!tensor.strides.is_null()).then_some(&strides[..rank]);
    // SAFETY: the caller's promise is the one that `Tensor::new` asks for.
    let tensor = unsafe {
        Tensor::new(
            name,
            address as *mut u8,
            device,
            dtype,
            &shape[..rank],
            strides,
        )
    };
    tensor.map(|tensor| match device_type {
        FOLIO_DEVICE_CUDA_HOST => Some(tensor.page_locked()),
        _ => Some(tensor),
    })
}
