//! Mirrors of the structs in `kernels/params/narrow.h`, field by field; sizes are asserted on both sides. What the fields
//! mean is written there.

use super::params::Divisor;

/// `FOLIO_NARROW_TABLES`.
pub const NARROW_TABLES: usize = 5;

/// `FolioNarrowTable`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct NarrowTable {
    pub from: u64,
    pub to: u64,
    pub stride: i64,
    pub count: i64,
    pub columns: Divisor,
    pub reserved: u32,
}

/// `FolioNarrowParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct NarrowParams {
    pub tables: [NarrowTable; NARROW_TABLES],
}

/// The numbers of the `static_assert` at the end of `kernels/params/narrow.h`.
const _: () = {
    assert!(size_of::<NarrowTable>() == 48);
    assert!(size_of::<NarrowParams>() == 240);
};

impl NarrowTable {
    /// Nothing to copy.
    pub const NONE: NarrowTable = NarrowTable {
        from: 0,
        to: 0,
        stride: 0,
        count: 0,
        columns: Divisor {
            divisor: 0,
            multiplier: 0,
            shift: 0,
        },
        reserved: 0,
    };
}
