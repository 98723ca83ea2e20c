//! Mirror of the struct in `kernels/params/mla_few.h`, field by field; its size is asserted on both sides. What the
//! fields mean is written there.

use super::mla_params::MlaParams;

/// `FolioMlaFewParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MlaFewParams {
    pub mla: MlaParams,
    pub kv_evict_first: u32,
    pub one_record: u32,
    pub boxes_log2: u32,
    pub page_step: u32,
    pub rope_page_step: u32,
    pub reserved: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/mla_few.h`.
const _: () = assert!(size_of::<MlaFewParams>() == 512);
