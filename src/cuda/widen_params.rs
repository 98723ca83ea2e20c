//! Mirrors of the structs in `kernels/params/widen.h`, field by field; their sizes are asserted on both sides. What the
//! fields mean is written there.

use super::params::{Cache, Divisor, PlanView, Rows};

/// `FOLIO_WIDENED_ROWS`.
pub const ROWS_TOGETHER: u32 = 32;

/// `FolioWidenParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct WidenParams {
    pub plan: PlanView,
    pub q: Rows,
    pub k: Cache,
    pub v: Cache,
    pub q_rows: u64,
    pub k_rows: u64,
    pub v_rows: u64,
    pub first_row: u64,
    pub page_start: u64,
    pub items: u64,
    pub page_size: Divisor,
    pub num_qo_heads: Divisor,
    pub num_kv_heads: Divisor,
    pub k_pieces: u32,
    pub v_pieces: u32,
    pub num_pages: u32,
    pub most_rows: u32,
    pub num_tokens: u32,
    pub q_dtype: u32,
    pub cache_dtype: u32,
    pub row_dtype: u32,
    pub num_units: u32,
    pub new_keys_apart: u32,
    pub reserved: u32,
    pub units: u64,
}

/// The number of the `static_assert` at the end of `kernels/params/widen.h`.
const _: () = assert!(size_of::<WidenParams>() == 304);
