//! The mirror of the struct in `kernels/params/tree_mask.h`, field by field; sizes are asserted on both sides. What the
//! fields mean is written there.

/// [`TreeMaskParams::wide`]: an output of int64, others are of int32.
pub const WIDE_POSITIONS: u32 = 1;
/// As [`WIDE_POSITIONS`].
pub const WIDE_NEXT_TOKEN: u32 = 2;
/// As [`WIDE_POSITIONS`].
pub const WIDE_NEXT_SIBLING: u32 = 4;

/// `FolioTreeMaskParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct TreeMaskParams {
    pub parents: u64,
    pub prefix_lens: u64,
    pub qo_indptr: u64,
    pub mask_bytes: u64,
    pub mask_bits: u64,
    pub tree_mask: u64,
    pub tree_bits: u64,
    pub positions: u64,
    pub next_token: u64,
    pub next_sibling: u64,
    pub bytes_room: i64,
    pub bits_room: i64,
    pub tree_room: i64,
    pub num_tokens: u32,
    pub batch_size: u32,
    pub tree_size: u32,
    pub row_bytes: u32,
    pub wide: u32,
    pub parts: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/tree_mask.h`.
const _: () = assert!(size_of::<TreeMaskParams>() == 128);
