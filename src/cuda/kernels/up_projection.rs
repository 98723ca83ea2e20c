//! Rows of the Hopper kernel that computes keys and values of all heads from latent rows that the heads share. Where it
//! lacks something, those of `projection` take each product alone.

use std::sync::LazyLock;

use super::row::{Arch, Row, Sizes, defines, name};
use crate::dtype::DType;

/// A row for one type and size of a tile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpProjectRow {
    /// The code.
    pub row: Row,
    /// Of all tensors.
    pub dtype: DType,
    /// What a cluster computes at a time.
    pub tile: UpProjectTile,
}

/// [`TOKENS`] of each CTA of a cluster, by chunks of columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpProjectTile {
    /// CTAs, which share weights.
    pub cluster: u32,
    /// Of [`CHUNK`] columns.
    pub chunks: u32,
}

/// Tokens that a CTA computes at a time; also in `kernels/sm90/projection/up_projection.cu`, as the next is.
pub const TOKENS: u32 = 128;

/// Columns of a chunk, which belong to one head.
pub const CHUNK: u32 = 64;

/// Large tiles read the least, small ones leave the fewest multiprocessors idle.
const TILES: [UpProjectTile; 4] = [tile(2, 4), tile(1, 4), tile(1, 2), tile(1, 1)];

const fn tile(cluster: u32, chunks: u32) -> UpProjectTile {
    UpProjectTile { cluster, chunks }
}

/// Two warpgroups that multiply, and a warp that loads.
const THREADS: u32 = 2 * 128 + 32;

/// Most shared memory of a CTA.
const WHOLE: u32 = 232_448;

/// Most stages: a tile of DeepSeek's depth has so many steps.
const STAGES: u32 = 8;

/// As many stages of 64 along the depth as there is room for, a chunk of results of each warpgroup, or two where it
/// stores one while it writes the next, and barriers. The kernel computes the number of stages from it.
fn shared_bytes(chunks: u32) -> u32 {
    const BARRIERS: u32 = 1024;
    let stage = (TOKENS + chunks * CHUNK) * 128;
    let results = chunks.min(2) * TOKENS * CHUNK * 2;
    let stages = ((WHOLE - results - BARRIERS) / stage).min(STAGES);
    stages * stage + results + BARRIERS
}

/// All rows.
pub fn rows() -> &'static [UpProjectRow] {
    // What was run on a device: nothing in the code is bf16's alone.
    static ROWS: LazyLock<[UpProjectRow; 4]> =
        LazyLock::new(|| TILES.map(|tile| row(DType::BF16, tile)));
    &*ROWS
}

impl AsRef<Row> for UpProjectRow {
    fn as_ref(&self) -> &Row {
        &self.row
    }
}

/// The rows for this type that run on the device.
pub fn candidates(
    dtype: DType,
    compute_capability: (u32, u32),
) -> impl Iterator<Item = &'static UpProjectRow> {
    let fits =
        move |row: &&UpProjectRow| row.dtype == dtype && row.row.arch.runs_on(compute_capability);
    rows().iter().filter(fits)
}

fn row(dtype: DType, tile: UpProjectTile) -> UpProjectRow {
    let sizes = Sizes {
        head_dim_qk: 0,
        head_dim_vo: 0,
        q_tile: TOKENS * tile.cluster,
        kv_tile: CHUNK * tile.chunks,
        threads: THREADS,
    };
    UpProjectRow {
        row: Row {
            name: name(
                "mla_up_project",
                Arch::Sm90a,
                (dtype, dtype),
                &[format!("t{}", sizes.q_tile), format!("n{}", sizes.kv_tile)],
            ),
            operator: "mla_up_project",
            arch: Arch::Sm90a,
            source: "sm90/projection/up_projection.cu",
            symbol: "folio_up_project",
            defines: defines(
                (dtype, dtype, Some(dtype)),
                &sizes,
                shared_bytes(tile.chunks),
            ),
            threads: THREADS,
            shared_bytes: shared_bytes(tile.chunks),
            bundled: true,
        },
        dtype,
        tile,
    }
}
