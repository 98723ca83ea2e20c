//! The mirror of the structs in `kernels/params/cascade.h`, field by field; sizes are asserted on both sides. What the fields
//! mean is written there.

use super::plan_params::PlanParams;

/// `FOLIO_NO_SEGMENT`.
pub const NO_SEGMENT: u32 = u32::MAX;

/// `FOLIO_SHARED_SEGMENTS`.
pub const SHARED_SEGMENTS: usize = 240;

/// Bytes of a `FolioPlanShare`, which only the kernel reads.
pub const PLAN_SHARE_BYTES: usize = 16;

/// `FolioSharedSegment`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct SharedSegmentParams {
    pub begin: u32,
    pub end: u32,
    pub keys: u32,
    pub parent: u32,
}

/// `FolioPlanCascadeParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PlanCascadeParams {
    pub plan: PlanParams,
    pub shares: u64,
    pub num_segments: u32,
    pub reserved: u32,
    pub segments: [SharedSegmentParams; SHARED_SEGMENTS],
}

/// The numbers of the `static_assert`s at the end of `kernels/params/cascade.h`.
const _: () = {
    assert!(size_of::<SharedSegmentParams>() == 16);
    assert!(size_of::<PlanCascadeParams>() == 4096);
};
