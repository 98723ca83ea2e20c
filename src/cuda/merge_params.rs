//! Mirror of the struct in `kernels/params/merge.h`, field by field; its size is asserted on both sides. What the fields
//! mean is written there.

use super::params::MergeStatesParams;

/// `FolioMergeGeneralParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MergeGeneralParams {
    pub merge: MergeStatesParams,
    pub indptr: u64,
    pub num_tokens_with_first: i64,
    pub o_factor: f32,
    pub o_dtype: u32,
    pub s_dtype: u32,
    pub s_out_dtype: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/merge.h`.
const _: () = assert!(size_of::<MergeGeneralParams>() == 264);
