//! The row of the kernel that cuts work on the device. It has no element type.

use std::sync::LazyLock;

use super::row::{Row, refusal};
use crate::dtype::DType;
use crate::error::Error;

/// All rows.
pub fn rows() -> &'static [Row] {
    static ROWS: LazyLock<[Row; 1]> = LazyLock::new(|| {
        let code = ("plan/plan.cu", "folio_plan");
        [Row::of_any_size("plan", code, [DType::F32; 3], 1024)]
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
    refusal("plan kernel", compute_capability, rows().iter())
}
