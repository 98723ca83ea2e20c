//! Page ids of requests, as kernels that gather tokens get them.

use crate::problem::RecordPages;

/// A list with offsets, or a table of rows.
pub struct PageIds {
    /// Address of the offsets; 0 for a table.
    pub indptr: u64,
    /// Address of the ids.
    pub ids: u64,
    /// Elements from row to row; 0 for a list.
    pub table_stride: i64,
    /// Ids of the list, or columns of the table.
    pub count: i64,
}

impl PageIds {
    /// Where `pages` lie.
    pub fn of(pages: &RecordPages) -> PageIds {
        match pages {
            RecordPages::Table(table) => PageIds {
                indptr: 0,
                ids: table.address() as u64,
                table_stride: table.stride(0),
                count: table.extent(1),
            },
            RecordPages::Csr { indptr, indices } => PageIds {
                indptr: indptr.address() as u64,
                ids: indices.address() as u64,
                table_stride: 0,
                count: indices.extent(0),
            },
        }
    }
}
