//! The row of the kernel that puts the partial results of split rows together. It takes types and dims at
//! run time.

use std::sync::LazyLock;

use super::row::{Row, refusal};
use crate::dtype::DType;
use crate::error::Error;

/// All rows.
pub fn rows() -> &'static [Row] {
    static ROWS: LazyLock<[Row; 1]> = LazyLock::new(|| {
        let code = ("plan/combine.cu", "folio_combine");
        [Row::of_any_size("combine", code, [DType::F32; 3], 256)]
    });
    &*ROWS
}

/// The rows that run on the device.
pub fn candidates(compute_capability: (u32, u32)) -> impl Iterator<Item = &'static Row> {
    rows()
        .iter()
        .filter(move |row| row.arch.runs_on(compute_capability))
}

/// The refusal of a device that no row runs on.
pub fn unsupported(compute_capability: (u32, u32)) -> Error {
    refusal("combine kernel", compute_capability, rows().iter())
}
