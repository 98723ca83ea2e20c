//! Rows of the kernels that write new tokens to a paged cache, as they are or normalised and rotated: one for each type of
//! tokens and of cache.

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

/// The rows of one operator.
pub struct AppendRows {
    operator: &'static str,
    rows: LazyLock<Vec<AppendRow>>,
}

/// Writes tokens as they are.
pub static APPEND: AppendRows = AppendRows {
    operator: "append",
    rows: LazyLock::new(|| rows("append", ("ops/append.cu", "folio_append"))),
};

/// Normalises and rotates queries and keys first.
pub static ROPE_APPEND: AppendRows = AppendRows {
    operator: "rope_append",
    rows: LazyLock::new(|| rows("rope_append", ("ops/rope_append.cu", "folio_rope_append"))),
};

/// The same where some rows do not move in vectors. These kernels are in the images of [`ROPE_APPEND`].
pub static ROPE_APPEND_LOOSE: AppendRows = AppendRows {
    operator: "rope_append",
    rows: LazyLock::new(|| {
        rows(
            "rope_append_loose",
            ("ops/rope_append.cu", "folio_rope_append_loose"),
        )
    }),
};

impl AppendRows {
    /// All rows.
    pub fn rows(&'static self) -> &'static [AppendRow] {
        &self.rows
    }

    /// The rows for these types that run on the device, the preferred ones first.
    pub fn candidates(
        &'static self,
        types: AppendTypes,
        compute_capability: (u32, u32),
    ) -> impl Iterator<Item = &'static AppendRow> {
        let fits =
            move |row: &&AppendRow| row.types == types && row.row.arch.runs_on(compute_capability);
        self.rows().iter().filter(fits)
    }

    /// The refusal of types that no row fits.
    pub fn unsupported(&'static self, types: AppendTypes, compute_capability: (u32, u32)) -> Error {
        let problem = format!(
            "{} kernel for tokens of {} and a cache of {}",
            self.operator,
            types.source.name(),
            types.cache.name()
        );
        refusal(
            &problem,
            compute_capability,
            self.rows().iter().map(|row| &row.row),
        )
    }
}

fn rows(operator: &'static str, code: (&'static str, &'static str)) -> Vec<AppendRow> {
    let row = |types: AppendTypes| {
        let AppendTypes { source, cache } = types;
        AppendRow {
            row: Row::of_any_size(operator, code, [source, cache, source], 128),
            types,
        }
    };
    TYPES.map(row).into()
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
