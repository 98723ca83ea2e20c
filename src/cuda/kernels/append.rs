//! Rows of the kernel that writes new tokens to a paged cache: one for each type of tokens and of cache.

use std::sync::LazyLock;

use super::row::{Row, refusal};
use crate::dtype::DType;
use crate::error::Error;

/// What a row is found by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AppendTypes {
    /// Of the new tokens.
    pub source: DType,
    /// Of the cache.
    pub cache: DType,
}

/// One variant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AppendRow {
    /// The code.
    pub row: Row,
    /// Its types.
    pub types: AppendTypes,
}

impl AsRef<Row> for AppendRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}

/// All rows.
pub fn rows() -> &'static [AppendRow] {
    static ROWS: LazyLock<Vec<AppendRow>> = LazyLock::new(|| TYPES.map(row).into());
    &ROWS
}

/// The rows for these types that run on the device, the preferred ones first.
pub fn candidates(
    types: AppendTypes,
    compute_capability: (u32, u32),
) -> impl Iterator<Item = &'static AppendRow> {
    let fits =
        move |row: &&AppendRow| row.types == types && row.row.arch.runs_on(compute_capability);
    rows().iter().filter(fits)
}

/// The refusal of types that no row fits.
pub fn unsupported(types: AppendTypes, compute_capability: (u32, u32)) -> Error {
    let problem = format!(
        "append kernel for tokens of {} and a cache of {}",
        types.source.name(),
        types.cache.name()
    );
    refusal(
        &problem,
        compute_capability,
        rows().iter().map(|row| &row.row),
    )
}

fn row(types: AppendTypes) -> AppendRow {
    let AppendTypes { source, cache } = types;
    let code = ("ops/append.cu", "folio_append");
    AppendRow {
        row: Row::of_any_size("append", code, [source, cache, source], 128),
        types,
    }
}

/// Tokens are stored as they are or in fp8.
const TYPES: [AppendTypes; 9] = [
    types(DType::BF16, DType::BF16),
    types(DType::F16, DType::F16),
    types(DType::F32, DType::F32),
    types(DType::BF16, DType::F8E4M3),
    types(DType::F16, DType::F8E4M3),
    types(DType::F32, DType::F8E4M3),
    types(DType::BF16, DType::F8E5M2),
    types(DType::F16, DType::F8E5M2),
    types(DType::F32, DType::F8E5M2),
];

const fn types(source: DType, cache: DType) -> AppendTypes {
    AppendTypes { source, cache }
}
