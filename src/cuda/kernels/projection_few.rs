//! Rows of the kernel that computes products per head of few tokens. Those of more tokens, of other types and devices, and
//! of rows that are not aligned, are in `projection`.

use std::sync::LazyLock;

use super::row::{Arch, Row, Sizes, defines, name};
use crate::dtype::DType;

/// A row for one order of the weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FewRow {
    /// The code.
    pub row: Row,
    /// Of all three tensors.
    pub dtype: DType,
    /// The weight's depth has the unit stride and not its columns.
    pub depth_first: bool,
}

/// Tokens that a CTA computes at a time.
pub const TOKENS: u32 = 8;

/// Columns that it computes.
pub const COLUMNS: u32 = 32;

/// What a warp has on its way of the depth; also in `kernels/ops/projection_few.cu`.
pub const DEPTH: u32 = 32;

/// Threads of a CTA at most.
const MOST_THREADS: u32 = 512;

/// Sums of all warps. Rows have 16 bytes more, so that tokens are in different banks.
const SHARED_BYTES: u32 = MOST_THREADS / 32 * TOKENS * (COLUMNS + 4) * 4;

/// All rows.
pub fn rows() -> &'static [FewRow] {
    static ROWS: LazyLock<Vec<FewRow>> = LazyLock::new(|| {
        // What was run on a device: nothing in the code is Hopper's alone, nor bf16's.
        [true, false]
            .map(|depth_first| row(DType::BF16, depth_first))
            .into()
    });
    &ROWS
}

impl AsRef<Row> for FewRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}

/// The rows for this type that run on the device.
pub fn candidates(
    dtype: DType,
    compute_capability: (u32, u32),
) -> impl Iterator<Item = &'static FewRow> {
    let fits = move |row: &&FewRow| row.dtype == dtype && row.row.arch.runs_on(compute_capability);
    rows().iter().filter(fits)
}

fn row(dtype: DType, depth_first: bool) -> FewRow {
    let (order, symbol) = match depth_first {
        true => ("depth_first", "folio_project_few_depth_first"),
        false => ("columns_first", "folio_project_few_columns_first"),
    };
    let sizes = Sizes {
        head_dim_qk: 0,
        head_dim_vo: 0,
        q_tile: TOKENS,
        kv_tile: COLUMNS,
        threads: MOST_THREADS,
    };
    FewRow {
        row: Row {
            name: name(
                "mla_project_few",
                Arch::Sm90a,
                (dtype, dtype),
                &[order.into()],
            ),
            operator: "mla_project_few",
            arch: Arch::Sm90a,
            source: "ops/projection_few.cu",
            symbol,
            defines: defines((dtype, dtype, Some(dtype)), &sizes, SHARED_BYTES),
            threads: sizes.threads,
            shared_bytes: SHARED_BYTES,
            bundled: true,
        },
        dtype,
        depth_first,
    }
}
