//! Mirrors of the structs in `kernels/params/index.h`, field by field; sizes are asserted on both sides. What the fields
//! mean is written there.

use super::integers_params::Integers;
use super::params::Divisor;
use crate::problem::TokenRows as Rows;

/// `FolioTokenRows`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct TokenRows {
    pub table: Integers,
    pub row_ids: Integers,
    pub page_size: Divisor,
    pub reserved: u32,
}

/// `FolioBatchLengthsParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct BatchLengthsParams {
    pub qo_len: Integers,
    pub cached_len: Integers,
    pub encoder_len: Integers,
    pub qo_indptr: Integers,
    pub kv_len: Integers,
    pub kv_indptr: Integers,
    pub row_kind: Integers,
    pub batch_size: u32,
    pub reserved: u32,
}

/// `FolioKvIndicesParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct KvIndicesParams {
    pub rows: TokenRows,
    pub kv_len: Integers,
    pub kv_start: Integers,
    pub kv_indptr: Integers,
    pub kv_indices: Integers,
    pub last_page_len: Integers,
    pub page_size: Divisor,
    pub window: u32,
    pub parts: Divisor,
    pub batch_size: u32,
}

/// `FolioBlockTableParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct BlockTableParams {
    pub kv_indptr: Integers,
    pub kv_indices: Integers,
    pub block_table: Integers,
    pub fill: i32,
    pub batch_size: u32,
    pub parts: u32,
    pub reserved: u32,
}

/// `FolioSlotMappingParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct SlotMappingParams {
    pub rows: TokenRows,
    pub qo_indptr: Integers,
    pub qo_len: Integers,
    pub kv_len: Integers,
    pub slot_mapping: Integers,
    pub positions: Integers,
    pub batch_size: u32,
    pub reserved: u32,
}

/// `FolioDraftKvIndicesParams`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct DraftKvIndicesParams {
    pub rows: TokenRows,
    pub kv_len: Integers,
    pub kv_indptr: Integers,
    pub kv_indices: Integers,
    pub batch_size: u32,
    pub topk: u32,
    pub num_steps: u32,
    pub slot_layout: u32,
    pub page_size: u32,
    pub blocks: Divisor,
    pub parts: Divisor,
    pub reserved: u32,
}

/// The numbers of the `static_assert`s at the end of `kernels/params/index.h`.
const _: () = {
    assert!(size_of::<TokenRows>() == 96);
    assert!(size_of::<BatchLengthsParams>() == 288);
    assert!(size_of::<KvIndicesParams>() == 328);
    assert!(size_of::<BlockTableParams>() == 136);
    assert!(size_of::<SlotMappingParams>() == 304);
    assert!(size_of::<DraftKvIndicesParams>() == 264);
};

impl TokenRows {
    /// Rows of a table.
    pub fn of(rows: &Rows) -> TokenRows {
        TokenRows {
            table: Integers::of(&rows.table),
            row_ids: Integers::of_any(rows.row_ids),
            page_size: Divisor::new(rows.page_size),
            reserved: 0,
        }
    }
}
