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
    /// What a CTA computes at a time: so many chunks of columns, of [`TOKENS`] tokens.
    pub chunks: u32,
}

impl UpProjectRow {
    /// CTAs of a cluster, which share weights; also in `kernels/sm90/projection/up_projection.cu`, as what follows is.
    pub fn cluster(&self) -> u32 {
        match self.chunks {
            4 => 2,
            _ => 1,
        }
    }
}

/// Tokens that a CTA computes at a time.
pub const TOKENS: u32 = 128;

/// Columns of a chunk, which belong to one head.
pub const CHUNK: u32 = 64;

/// The sizes of tiles in chunks. Large tiles read the least, small ones leave the fewest multiprocessors idle.
const CHUNKS: [u32; 3] = [4, 2, 1];

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
    static ROWS: LazyLock<[UpProjectRow; 3]> =
        LazyLock::new(|| CHUNKS.map(|chunks| row(DType::BF16, chunks)));
    &*ROWS
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

fn row(dtype: DType, chunks: u32) -> UpProjectRow {
    let sizes = Sizes {
        head_dim_qk: 0,
        head_dim_vo: 0,
        q_tile: TOKENS,
        kv_tile: CHUNK * chunks,
        threads: THREADS,
    };
    UpProjectRow {
        row: Row {
            name: name(
                "mla_up_project",
                Arch::Sm90a,
                (dtype, dtype),
                &[format!("n{}", CHUNK * chunks)],
            ),
            operator: "mla_up_project",
            arch: Arch::Sm90a,
            source: "sm90/projection/up_projection.cu",
            symbol: "folio_up_project",
            defines: defines((dtype, dtype, Some(dtype)), &sizes, shared_bytes(chunks)),
            threads: THREADS,
            shared_bytes: shared_bytes(chunks),
            bundled: true,
        },
        dtype,
        chunks,
    }
}
