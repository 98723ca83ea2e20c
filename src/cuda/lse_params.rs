//! Mirror of the struct in `kernels/params/lse.h`, field by field; its size is asserted on both sides. What the fields mean is
//! written there.

/// `FolioRoundLseParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct RoundLseParams {
    pub qo_indptr: u64,
    pub counts: u64,
    pub from: u64,
    pub to: u64,
    pub stride_token: i64,
    pub stride_head: i64,
    pub num_tokens: u32,
    pub num_heads: u32,
    pub dtype: u32,
    pub reserved: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/lse.h`.
const _: () = assert!(size_of::<RoundLseParams>() == 64);
