//! Mirror of the struct in `kernels/params/integers.h`, field by field; its size is asserted on both sides. What the fields
//! mean is written there.

use crate::tensor::Tensor;

/// `FolioIntegers`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Integers {
    pub data: u64,
    pub rows: i64,
    pub columns: i64,
    pub stride: i64,
    pub bytes: u32,
    pub reserved: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/integers.h`.
const _: () = assert!(size_of::<Integers>() == 40);

impl Integers {
    /// A list, or a table whose rows lie side by side in themselves.
    pub fn of(tensor: &Tensor) -> Integers {
        let (rows, stride) = match tensor.rank() {
            1 => (1, 0),
            _ => (tensor.extent(0), tensor.stride(0)),
        };
        Integers {
            data: tensor.address() as u64,
            rows,
            columns: tensor.extent(tensor.rank() - 1),
            stride,
            bytes: tensor.dtype().size() as u32,
            reserved: 0,
        }
    }

    /// Absent: all 0.
    pub fn of_any(tensor: Option<Tensor>) -> Integers {
        tensor.as_ref().map(Integers::of).unwrap_or_default()
    }
}
