//! Mirror of the struct in `kernels/params/prefill.h`, field by field; its size is asserted on both sides. What the
//! fields mean is written there.

use super::params::AttentionParams;

/// `FolioPrefillParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PrefillParams {
    pub attention: AttentionParams,
    pub head_dim_vo: u32,
    pub reserved: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/prefill.h`.
const _: () = assert!(size_of::<PrefillParams>() == 384);
