//! The mirror of the structs in `kernels/params/plan.h`, field by field; sizes are asserted on both sides. What the fields
//! mean is written there.

use super::params::Divisor;

/// Bytes of a `FolioPlanRequest`, which only the kernel reads.
pub const PLAN_REQUEST_BYTES: usize = 32;

/// `FolioPlanOrder`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum PlanOrder {
    ByCost = 0,
    ByRequest = 1,
    ByShare = 2,
}

/// `FolioPlanParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PlanParams {
    pub qo_indptr: u64,
    pub kv_indptr: u64,
    pub kv_len: u64,
    pub last_page_len: u64,
    pub table_stride: i64,
    pub num_page_ids: i64,
    pub out_qo_indptr: u64,
    pub out_kv_len: u64,
    pub out_mask_bytes_start: u64,
    pub out_mask_bits_start: u64,
    pub requests: u64,
    pub first_item: u64,
    pub first_combine: u64,
    pub items: u64,
    pub combines: u64,
    pub partials: u64,
    pub counts: u64,
    pub next_tile: u64,
    pub decode_counts: u64,
    pub q_tile: Divisor,
    pub batch_size: u32,
    pub fixed_qo_len: u32,
    pub page_size: u32,
    pub kv_unit: u32,
    pub max_splits: u32,
    pub invariant_chunk: u32,
    pub max_shares: u32,
    pub least_gain: u32,
    pub combine_units: u32,
    pub window_left: i32,
    pub max_qo_len: u32,
    pub max_kv_len: u32,
    pub max_num_tokens: u32,
    pub max_items: u32,
    pub max_combines: u32,
    pub max_partial_rows: u32,
    pub decode_rows: u32,
    pub least_units: u32,
    pub order: u32,
}

/// `FolioPlanWorkers`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PlanWorkersParams {
    pub of_item: u32,
    pub most_rows: u32,
    pub num_heads: u32,
    pub rows_of_tile: u32,
    pub all: u32,
    pub rows_of_unit: u32,
}

/// `FolioPlanTail`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PlanTailParams {
    pub most_chunks: u32,
    pub item_units: u32,
    pub combine_units: u32,
    pub least_gain: u32,
    pub units_of_row: f32,
    pub reserved: u32,
}

/// `FOLIO_NARROW_TILES`.
pub const NARROW_TILES: usize = 2;

/// `FolioPlanNarrow`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PlanNarrowParams {
    pub q_tile: [Divisor; NARROW_TILES],
    pub count: u32,
    pub at_a_time: u32,
    pub least_gain: u32,
    pub reserved: u32,
}

/// `FolioPlanBatchParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct PlanBatchParams {
    pub plan: PlanParams,
    pub workers: PlanWorkersParams,
    pub tail: PlanTailParams,
    pub narrow: PlanNarrowParams,
}

/// The numbers of the `static_assert`s at the end of `kernels/params/plan.h`.
const _: () = {
    assert!(size_of::<PlanParams>() == 240);
    assert!(size_of::<PlanBatchParams>() == 328);
};
