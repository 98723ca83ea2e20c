//! Mirror of the struct in `kernels/params/widen.h`, field by field; its size is asserted on both sides. What the fields
//! mean is written there.

use super::params::{Cache, Divisor, PlanView};

/// `FOLIO_WIDENED_ROWS`.
pub const ROWS_TOGETHER: u32 = 32;

/// `FolioWidenParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct WidenParams {
    pub plan: PlanView,
    pub k: Cache,
    pub v: Cache,
    pub k_rows: u64,
    pub v_rows: u64,
    pub first_row: u64,
    pub page_start: u64,
    pub items: u64,
    pub page_size: Divisor,
    pub num_kv_heads: Divisor,
    pub k_pieces: u32,
    pub v_pieces: u32,
    pub num_pages: u32,
    pub most_rows: u32,
    pub window_left: i32,
    pub cache_dtype: u32,
    pub row_dtype: u32,
    pub reserved: u32,
}

/// The number of the `static_assert` at the end of `kernels/params/widen.h`.
const _: () = assert!(size_of::<WidenParams>() == 240);
