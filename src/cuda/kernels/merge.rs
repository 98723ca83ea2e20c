//! Rows of the kernels that merge attention states: four for each element type, from one compilation.

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

/// What a kernel can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Every token has as many states, the output is of their type, and every lse of fp32.
    Plain,
    /// Tokens have numbers of states of their own, the output is fp8, or an lse is of 16 bits.
    General,
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
    /// Of what form.
    pub form: Form,
}

impl AsRef<Row> for MergeRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}

/// All rows.
pub fn rows() -> &'static [MergeRow] {
    static ROWS: LazyLock<Vec<MergeRow>> = LazyLock::new(|| {
        let of_type = |dtype| {
            [Form::Plain, Form::General]
                .map(|form| [row(dtype, States::Any, form), row(dtype, States::Two, form)])
                .concat()
        };
        [DType::BF16, DType::F16, DType::F32]
            .into_iter()
            .flat_map(of_type)
            .collect()
    });
    &ROWS
}

/// The rows for a type, a number of states and a form that run on the device, the preferred ones first.
pub fn candidates(
    dtype: DType,
    (states, form): (States, Form),
    compute_capability: (u32, u32),
) -> impl Iterator<Item = &'static MergeRow> {
    rows().iter().filter(move |row| {
        row.dtype == dtype
            && (row.states, row.form) == (states, form)
            && row.row.arch.runs_on(compute_capability)
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

fn row(dtype: DType, states: States, form: Form) -> MergeRow {
    let (operator, symbol) = match (states, form) {
        (States::Any, Form::Plain) => ("merge_states", "folio_merge_states"),
        (States::Two, Form::Plain) => ("merge_state", "folio_merge_state"),
        (States::Any, Form::General) => ("merge_states_general", "folio_merge_states_general"),
        (States::Two, Form::General) => ("merge_state_general", "folio_merge_state_general"),
    };
    MergeRow {
        row: Row::of_any_size(operator, ("ops/merge.cu", symbol), [dtype; 3], 128),
        dtype,
        states,
        form,
    }
}
