//! Mirror of the struct in `kernels/params/latent_queries.h`, field by field; its size is asserted on both sides. What the fields
//! mean is written there.

use super::params::{Divisor, Rows};

/// `FolioLatentQueriesParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct LatentQueriesParams {
    pub qo_indptr: u64,
    pub counts: u64,
    pub q: Rows,
    pub q_rope: Rows,
    pub rows: u64,
    pub num_heads: Divisor,
    pub num_tokens: u32,
    pub pieces: u32,
    pub rope_pieces: u32,
    pub q_dtype: u32,
    pub row_dtype: u32,
    pub is_aligned: u32,
    pub reserved: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/latent_queries.h`.
const _: () = assert!(size_of::<LatentQueriesParams>() == 112);
