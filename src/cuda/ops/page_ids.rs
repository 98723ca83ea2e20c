//! Page ids of requests, as kernels that gather tokens get them.

use crate::cuda::integers_params::Integers;
use crate::problem::RecordPages;

/// A list with offsets, or a table of rows.
pub struct PageIds {
    /// The offsets; absent for a table.
    pub indptr: Integers,
    /// The ids.
    pub ids: Integers,
}

impl PageIds {
    /// Where `pages` lie.
    pub fn of(pages: &RecordPages) -> PageIds {
        match pages {
            RecordPages::Table(table) => PageIds {
                indptr: Integers::default(),
                ids: Integers::of(table),
            },
            RecordPages::Csr { indptr, indices } => PageIds {
                indptr: Integers::of(indptr),
                ids: Integers::of(indices),
            },
        }
    }
}
