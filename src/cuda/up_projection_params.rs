//! What the kernel of the up-projection takes: mirrors `kernels/params/up_projection.h` field by field.

/// `FolioUpProjectionPart`: the keys of all heads, or the values.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct UpProjectionPart {
    pub columns: u32,
    pub depth_first: u32,
}

/// `FolioUpProjectionParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct UpProjectionParams {
    pub existing_tokens: u64,
    pub num_tokens: u32,
    pub num_heads: u32,
    pub depth: u32,
    pub reserved: u32,
    pub keys: UpProjectionPart,
    pub values: UpProjectionPart,
}

/// The number of the `static_assert` at the end of `kernels/params/up_projection.h`.
const _: () = assert!(size_of::<UpProjectionParams>() == 40);
