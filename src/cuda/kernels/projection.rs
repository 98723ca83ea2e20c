//! Rows of the kernels that compute products per head, and of the one that copies their weights. For Hopper there is a
//! row for each tile and each order of the weight in memory; the portable kernel takes any product.

use std::sync::LazyLock;

use super::row::{Arch, Row, Sizes, defines, name, refusal};
use crate::dtype::DType;
use crate::error::Error;

/// What a kernel computes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows.
    pub tokens: u32,
    /// Columns of the weight.
    pub columns: u32,
}

/// A row for one order of the weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProjectRow {
    /// The code.
    pub row: Row,
    /// Of all three tensors.
    pub dtype: DType,
    /// What a CTA computes at a time; `None` for the portable kernel.
    pub tile: Option<Tile>,
    /// The weight's depth has the unit stride and not its columns. The portable kernel takes both.
    pub depth_first: bool,
}

impl AsRef<Row> for ProjectRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}

/// Types of a copy of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CopyTypes {
    /// Of what is read.
    pub source: DType,
    /// Of what is written.
    pub target: DType,
}

/// A copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyRow {
    /// The code.
    pub row: Row,
    /// Its types.
    pub types: CopyTypes,
}

impl AsRef<Row> for CopyRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}

/// What matrix units multiply.
const TYPES: [DType; 2] = [DType::BF16, DType::F16];

/// The tiles of the Hopper kernel. One of 16 tokens leaves the most room for weights that are under way. One of 32
/// tokens was run in bf16 alone.
const TILES: [Tile; 7] = [
    tile(16, 64),
    tile(16, 128),
    OF_32_TOKENS,
    tile(64, 64),
    tile(64, 128),
    tile(128, 128),
    tile(256, 128),
];

const OF_32_TOKENS: Tile = tile(32, 64);

/// A tile.
pub const fn tile(tokens: u32, columns: u32) -> Tile {
    Tile { tokens, columns }
}

/// CTAs of the row that a multiprocessor holds: its shared memory is what they share.
pub fn blocks_per_multiprocessor(row: &Row) -> u32 {
    if row.shared_bytes <= HALF { 2 } else { 1 }
}

/// Shared memory of a CTA that has a multiprocessor for itself, and of one of two: each has 1 KiB that is the system's.
const WHOLE: u32 = 232_448;
const HALF: u32 = 233_472 / 2 - 1024;

impl Tile {
    /// Warpgroups of 128 threads that multiply: one for 64 tokens, two at most. Two warps load.
    fn warpgroups(self) -> u32 {
        (self.tokens / 64).clamp(1, 2)
    }

    /// As many stages as there is room for, the results, and barriers. The kernel computes the number of stages from
    /// it.
    fn shared_bytes(self) -> u32 {
        const BARRIERS: u32 = 1024;
        let stage = (self.tokens + self.columns) * 128;
        let results = self.tokens * self.columns * 2;
        let room = if self.tokens <= 64 { HALF } else { WHOLE } - results - BARRIERS;
        room / stage * stage + results + BARRIERS
    }
}

/// All rows that compute products.
pub fn rows() -> &'static [ProjectRow] {
    static ROWS: LazyLock<Vec<ProjectRow>> = LazyLock::new(|| {
        let hopper = |dtype| {
            TILES
                .into_iter()
                .flat_map(move |tile| [true, false].map(|order| hopper(dtype, tile, order)))
                .filter(|row| row.tile != Some(OF_32_TOKENS) || row.dtype == DType::BF16)
        };
        let portable = TYPES.map(portable);
        TYPES.into_iter().flat_map(hopper).chain(portable).collect()
    });
    &ROWS
}

/// All rows that copy weights.
pub fn copy_rows() -> &'static [CopyRow] {
    static ROWS: LazyLock<Vec<CopyRow>> = LazyLock::new(|| COPIES.map(copy_row).into());
    &ROWS
}

/// The rows for this type that run on the device.
pub fn candidates(
    dtype: DType,
    compute_capability: (u32, u32),
) -> impl Iterator<Item = &'static ProjectRow> {
    let fits =
        move |row: &&ProjectRow| row.dtype == dtype && row.row.arch.runs_on(compute_capability);
    rows().iter().filter(fits)
}

/// The rows that copy between these types.
pub fn copy_candidates(
    types: CopyTypes,
    compute_capability: (u32, u32),
) -> impl Iterator<Item = &'static CopyRow> {
    let fits = move |row: &&CopyRow| row.types == types && row.row.arch.runs_on(compute_capability);
    copy_rows().iter().filter(fits)
}

/// The refusal of a type that no row fits.
pub fn unsupported(dtype: DType, compute_capability: (u32, u32)) -> Error {
    let problem = format!("MLA projection kernel for tensors of {}", dtype.name());
    let rows = rows().iter().map(|row| &row.row);
    refusal(&problem, compute_capability, rows)
}

/// The refusal of types that no copy has.
pub fn unsupported_copy(types: CopyTypes, compute_capability: (u32, u32)) -> Error {
    let problem = format!(
        "kernel that copies MLA weights from {} to {}",
        types.source.name(),
        types.target.name()
    );
    let rows = copy_rows().iter().map(|row| &row.row);
    refusal(&problem, compute_capability, rows)
}

fn hopper(dtype: DType, tile: Tile, depth_first: bool) -> ProjectRow {
    let (order, symbol) = match depth_first {
        true => ("depth_first", "folio_project_depth_first"),
        false => ("columns_first", "folio_project_columns_first"),
    };
    let sizes = Sizes {
        head_dim_qk: 0,
        head_dim_vo: 0,
        q_tile: tile.tokens,
        kv_tile: tile.columns,
        threads: 128 * tile.warpgroups() + 64,
    };
    let parts = [
        format!("t{}", tile.tokens),
        format!("n{}", tile.columns),
        order.into(),
    ];
    ProjectRow {
        row: Row {
            name: name("mla_project", Arch::Sm90a, (dtype, dtype), &parts),
            operator: "mla_project",
            arch: Arch::Sm90a,
            source: "sm90/projection/projection.cu",
            symbol,
            defines: defines((dtype, dtype, Some(dtype)), &sizes, tile.shared_bytes()),
            threads: sizes.threads,
            shared_bytes: tile.shared_bytes(),
            bundled: true,
        },
        dtype,
        tile: Some(tile),
        depth_first,
    }
}

fn portable(dtype: DType) -> ProjectRow {
    let code = ("ops/projection.cu", "folio_project");
    ProjectRow {
        row: Row::of_any_size("mla_project", code, [dtype; 3], 128),
        dtype,
        tile: None,
        depth_first: false,
    }
}

fn copy_row(types: CopyTypes) -> CopyRow {
    let CopyTypes { source, target } = types;
    let code = ("ops/copy_weights.cu", "folio_copy_weights");
    CopyRow {
        row: Row::of_any_size("mla_copy_weights", code, [source, target, target], 256),
        types,
    }
}

/// To types that there are products of. Numbers of fp32 are copied for MLA contexts.
const COPIES: [CopyTypes; 5] = [
    copy(DType::F32, DType::F32),
    copy(DType::BF16, DType::BF16),
    copy(DType::F16, DType::F16),
    copy(DType::F32, DType::BF16),
    copy(DType::F32, DType::F16),
];

const fn copy(source: DType, target: DType) -> CopyTypes {
    CopyTypes { source, target }
}

/// Tokens and columns of a tile of the portable kernel; also in `kernels/ops/projection.cu`.
pub const PORTABLE_TILE: Tile = tile(64, 64);

/// Rows and columns of a tile of a copy; also in `kernels/ops/copy_weights.cu`.
pub const COPY_TILE: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_blocks_fit_where_two_are_counted() {
        for row in rows().iter().filter(|row| row.tile.is_some()) {
            let blocks = blocks_per_multiprocessor(&row.row);
            let tile = row.tile.unwrap();
            assert_eq!(
                blocks,
                if tile.tokens <= 64 { 2 } else { 1 },
                "{}",
                row.row.name
            );
            assert!(blocks * (row.row.shared_bytes + 1024) <= 233_472);
            assert!(row.row.shared_bytes <= WHOLE);
        }
    }
}
