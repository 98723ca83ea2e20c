//! Rows of the Hopper kernel that computes keys and values of all heads from latent rows that the heads share. Where it
//! lacks something, those of `projection` take each product alone.

use std::sync::LazyLock;

use super::row::{Arch, Row, Sizes, defines, name};
use crate::dtype::DType;

/// A row for one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpProjectRow {
    /// The code.
    pub row: Row,
    /// Of all tensors.
    pub dtype: DType,
}

/// CTAs of a cluster, which share weights; also in `kernels/sm90/projection/up_projection.cu`, as the next two are.
pub const CLUSTER: u32 = 2;

/// Tokens that a CTA computes at a time.
pub const TOKENS: u32 = 128;

/// Columns that it computes at a time: chunks, each of one head.
pub const CHUNK: u32 = 64;
/// See [`CHUNK`].
pub const CHUNKS: u32 = 4;

/// Two warpgroups that multiply, and a warp that loads.
const THREADS: u32 = 2 * 128 + 32;

/// Four stages of 64 along the depth, two chunks of results of each warpgroup, and barriers.
const SHARED_BYTES: u32 = 4 * (TOKENS + CHUNKS * CHUNK) * 128 + 4 * 64 * CHUNK * 2 + 1024;

/// All rows.
pub fn rows() -> &'static [UpProjectRow] {
    // What was run on a device: nothing in the code is bf16's alone.
    static ROWS: LazyLock<[UpProjectRow; 1]> = LazyLock::new(|| [row(DType::BF16)]);
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

fn row(dtype: DType) -> UpProjectRow {
    let sizes = Sizes {
        head_dim_qk: 0,
        head_dim_vo: 0,
        q_tile: TOKENS,
        kv_tile: CHUNK * CHUNKS,
        threads: THREADS,
    };
    UpProjectRow {
        row: Row {
            name: name("mla_up_project", Arch::Sm90a, (dtype, dtype), &[]),
            operator: "mla_up_project",
            arch: Arch::Sm90a,
            source: "sm90/projection/up_projection.cu",
            symbol: "folio_up_project",
            defines: defines((dtype, dtype, Some(dtype)), &sizes, SHARED_BYTES),
            threads: THREADS,
            shared_bytes: SHARED_BYTES,
            bundled: true,
        },
        dtype,
    }
}
