//! Mirrors of the structs in `kernels/params/gather.h`, field by field; sizes are asserted on both sides. What the fields
//! mean is written there.

use super::integers_params::Integers;
use super::params::{Cache, Divisor, Rows};

/// `FolioGatheredTensor`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct GatheredTensor {
    pub cache: Cache,
    pub rows: Rows,
    pub scales: u64,
    pub scale: f32,
    pub scales_stride: i32,
    pub head_pieces: Divisor,
    pub head_dim: u32,
}

/// `FolioKvGatherParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct KvGatherParams {
    pub k: GatheredTensor,
    pub v: GatheredTensor,
    pub cu_seq_lens: Integers,
    pub seq_starts: Integers,
    pub page_indptr: Integers,
    pub page_ids: Integers,
    pub num_rows: i64,
    pub page_size: Divisor,
    pub batch_size: u32,
    pub num_pages: u32,
    pub num_kv_heads: u32,
    pub cache_dtype: u32,
    pub row_dtype: u32,
    pub vectors: u32,
    pub reserved: u32,
}

/// The numbers of the `static_assert`s at the end of `kernels/params/gather.h`.
const _: () = {
    assert!(size_of::<GatheredTensor>() == 88);
    assert!(size_of::<KvGatherParams>() == 384);
};
