//! Mirrors of the structs in `kernels/params/copy.h`, field by field; sizes are asserted on both sides. What the fields
//! mean is written there.

use super::params::Divisor;

/// `FolioPagesToCopy`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct PagesToCopy {
    pub src: u64,
    pub dst: u64,
    pub src_stride: i64,
    pub dst_stride: i64,
    pub page_bytes: i64,
    pub pieces: u32,
    pub reserved: u32,
}

/// `FolioKvCopyParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct KvCopyParams {
    pub k: PagesToCopy,
    pub v: PagesToCopy,
    pub pairs: u64,
    pub num_pieces: u32,
    pub pair_pieces: Divisor,
    pub src_pages: u32,
    pub dst_pages: u32,
    pub pair_bytes: u32,
    pub unit_bytes: u32,
}

/// `FOLIO_KV_COPY_PAIRS`.
pub const KV_COPY_PAIRS: usize = 480;

/// `FolioKvCopyList`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct KvCopyList {
    pub copy: KvCopyParams,
    pub pairs: [[i32; 2]; KV_COPY_PAIRS],
}

/// The numbers of the `static_assert`s at the end of `kernels/params/copy.h`.
const _: () = {
    assert!(size_of::<PagesToCopy>() == 48);
    assert!(size_of::<KvCopyParams>() == 136);
    assert!(size_of::<KvCopyList>() == 3976);
};
