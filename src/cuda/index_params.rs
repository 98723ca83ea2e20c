//! Mirrors of the structs in `kernels/params/index.h`, field by field; sizes are asserted on both sides. What the fields
//! mean is written there.

use super::params::Divisor;
use crate::problem::TokenRows as Rows;
use crate::tensor::Tensor;

/// `FolioIntegers`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Integers {
    pub data: u64,
    pub rows: i64,
    pub columns: i64,
    pub stride: i64,
    pub bytes: u32,
    pub reserved: u32,
}

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
    pub batch_size: u32,
    pub reserved: u32,
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
    pub parts: u32,
}

/// The numbers of the `static_assert`s at the end of `kernels/params/index.h`.
const _: () = {
    assert!(size_of::<Integers>() == 40);
    assert!(size_of::<TokenRows>() == 96);
    assert!(size_of::<BatchLengthsParams>() == 288);
    assert!(size_of::<KvIndicesParams>() == 320);
    assert!(size_of::<BlockTableParams>() == 136);
    assert!(size_of::<SlotMappingParams>() == 304);
    assert!(size_of::<DraftKvIndicesParams>() == 240);
};

impl Integers {
    /// A list, or a table whose rows lie side by side in themselves.
    pub fn of(tensor: &Tensor) -> Integers {
        let (rows, stride) = match tensor.rank() {
            1 => (1, 0),
            _ => (tensor.extent(0), tensor.stride(0)),
        };
        Integers {
            data: tensor.address() as u64,
            rows,
            columns: tensor.extent(tensor.rank() - 1),
            stride,
            bytes: tensor.dtype().size() as u32,
            reserved: 0,
        }
    }

    /// Absent: all 0.
    pub fn of_any(tensor: Option<Tensor>) -> Integers {
        tensor.as_ref().map(Integers::of).unwrap_or_default()
    }
}

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
