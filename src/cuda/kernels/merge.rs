//! Rows of the kernels that merge attention states: two for each element type, from one compilation.

use std::sync::LazyLock;

use super::row::{Row, refusal};
use crate::dtype::DType;
use crate::error::Error;

/// How many states a kernel merges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum States {
    /// Any number, rows of any size.
    Any,
    /// Two, where a row is at most a vector per lane of a warp.
    Two,
}

/// One variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeRow {
    /// The code.
    pub row: Row,
    /// Type of the states' rows.
    pub dtype: DType,
    /// How many it merges.
    pub states: States,
}

impl AsRef<Row> for MergeRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}

/// All rows.
pub fn rows() -> &'static [MergeRow] {
    static ROWS: LazyLock<Vec<MergeRow>> = LazyLock::new(|| {
        let of_type = |dtype| [row(dtype, States::Any), row(dtype, States::Two)];
        [DType::BF16, DType::F16, DType::F32]
            .into_iter()
            .flat_map(of_type)
            .collect()
    });
    &ROWS
}

/// The rows for a type and number of states that run on the device, the preferred ones first.
pub fn candidates(
    dtype: DType,
    states: States,
    compute_capability: (u32, u32),
) -> impl Iterator<Item = &'static MergeRow> {
    rows().iter().filter(move |row| {
        row.dtype == dtype && row.states == states && row.row.arch.runs_on(compute_capability)
    })
}

/// The refusal of a type that no row fits.
pub fn unsupported(dtype: DType, compute_capability: (u32, u32)) -> Error {
    refusal(
        &format!("merge kernel for states of {}", dtype.name()),
        compute_capability,
        rows().iter().map(|row| &row.row),
    )
}

fn row(dtype: DType, states: States) -> MergeRow {
    let (operator, symbol) = match states {
        States::Any => ("merge_states", "folio_merge_states"),
        States::Two => ("merge_state", "folio_merge_state"),
    };
    MergeRow {
        row: Row::of_any_size(operator, ("ops/merge.cu", symbol), [dtype; 3], 128),
        dtype,
        states,
    }
}
