//! Mirror of the struct in `kernels/params/new_tokens.h`; its size is asserted on both sides. What the fields mean is written
//! there.

use super::params::DecodeParams;
use super::rope_append_params::RopeAppendParams;

/// `FolioNewTokensParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct NewTokensParams {
    pub decode: DecodeParams,
    pub rope: RopeAppendParams,
}

/// The number of `kernels/params/new_tokens.h`.
const _: () = assert!(size_of::<NewTokensParams>() == 2904);
