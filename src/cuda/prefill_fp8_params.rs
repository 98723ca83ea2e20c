//! Mirror of the structs in `kernels/params/prefill_fp8.h`, field by field; the size of the last is asserted on both sides. What the
//! fields mean is written there.

use super::params::{AttentionParams, Divisor};

/// `FolioPieces`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct Pieces {
    pub page: u32,
    pub token: u32,
    pub head: u32,
    pub head_dim: u32,
}

/// `FolioPrefillFp8Params`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PrefillFp8Params {
    pub attention: AttentionParams,
    pub o_dtype: u32,
    pub page_groups: u32,
    pub head_dim_vo: u32,
    pub k: Pieces,
    pub v: Pieces,
    pub page_size: Divisor,
}

/// The number of the `static_assert` at the end of `kernels/params/prefill_fp8.h`.
const _: () = assert!(size_of::<PrefillFp8Params>() == 432);
