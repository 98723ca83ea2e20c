//! Mirrors of the structs in `kernels/params/scales.h`, field by field; sizes are asserted on both sides. What the fields
//! mean is written there.

use super::params::{address, are_of_requests, scales_stride};
use crate::tensor::Tensor;

/// `FolioRowScales`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct RowScales {
    pub data: u64,
    pub stride: u32,
    pub request_stride: u32,
}

/// `FolioFoldScalesParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct FoldScalesParams {
    pub q: RowScales,
    pub k: RowScales,
    pub v: RowScales,
    pub o: u64,
    pub k_out: u64,
    pub v_out: u64,
    pub num_kv_heads: u32,
    pub num_requests: u32,
}

/// The numbers of the `static_assert` at the end of `kernels/params/scales.h`.
const _: () = {
    assert!(size_of::<RowScales>() == 16);
    assert!(size_of::<FoldScalesParams>() == 80);
};

impl RowScales {
    /// `[1]`, `[num_kv_heads]` or `[batch_size, num_kv_heads]`.
    pub fn of(scales: Option<Tensor>) -> RowScales {
        let of_requests = scales.filter(are_of_requests);
        RowScales {
            data: address(scales),
            stride: scales_stride(scales) as u32,
            request_stride: of_requests.map_or(0, |scales| scales.extent(1) as u32),
        }
    }
}
