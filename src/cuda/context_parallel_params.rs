//! Mirrors of the structs in `kernels/params/context_parallel.h`, field by field; sizes are asserted on both sides. What
//! the fields mean is written there.

use super::params::{Divisor, Rows};

/// `FolioCpReorderParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CpReorderParams {
    pub gathered: u64,
    pub dst: u64,
    pub gathered_stride_rank: i64,
    pub gathered_stride_row: i64,
    pub dst_stride_row: i64,
    pub context_lens: u64,
    pub cu_seq_lens: u64,
    pub cu_padded_lens: u64,
    pub num_rows: i64,
    pub rank_rows: i64,
    pub local_start: i64,
    pub batch_size: u32,
    pub world_size: u32,
    pub interleave: u32,
    pub row_bytes: u32,
    pub unit_bytes: u32,
    pub reserved: u32,
}

/// `FolioCpCorrectParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CpCorrectParams {
    pub lse_all: u64,
    pub lse_stride_rank: i64,
    pub lse_stride_token: i64,
    pub lse_stride_head: i64,
    pub o: Rows,
    pub o_out: Rows,
    pub lse_out: u64,
    pub lse_out_stride_token: i64,
    pub lse_out_stride_head: i64,
    pub num_rows: i64,
    pub num_heads: Divisor,
    pub rank: u32,
    pub world_size: u32,
    pub head_dim: u32,
    pub dtype: u32,
    pub flags: u32,
    pub vectors: u32,
    pub reserved: u32,
}

/// The numbers of the `static_assert`s at the end of `kernels/params/context_parallel.h`.
const _: () = {
    assert!(size_of::<CpReorderParams>() == 112);
    assert!(size_of::<CpCorrectParams>() == 152);
};
