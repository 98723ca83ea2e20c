//! Mirror of the struct in `kernels/params/prefill_fp8.h`, field by field; its size is asserted on both sides. What the
//! fields mean is written there.

use super::params::AttentionParams;

/// `FolioPrefillFp8Params`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PrefillFp8Params {
    pub attention: AttentionParams,
    pub o_dtype: u32,
    pub page_groups: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/prefill_fp8.h`.
const _: () = assert!(size_of::<PrefillFp8Params>() == 384);
