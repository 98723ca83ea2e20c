//! Mirror of the struct in `kernels/params/items.h`, field by field; its size is asserted on both sides. What the fields mean
//! is written there.

/// `FolioMaskItemsParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct MaskItemsParams {
    pub qo_indptr: u64,
    pub kv_len: u64,
    pub counts: u64,
    pub mask_start: u64,
    pub starts: u64,
    pub positions: u64,
    pub mask: u64,
    pub mask_bytes: i64,
    pub columns: i64,
}

/// The number of the `static_assert` at the end of `kernels/params/items.h`.
const _: () = assert!(size_of::<MaskItemsParams>() == 72);
