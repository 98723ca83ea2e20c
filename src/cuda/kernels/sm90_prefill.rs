//! Rows of the Hopper prefill kernels.

use super::row::{Arch, Family, Fit, Op, Shape, Types, same};
use crate::dtype::DType;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        defines: PAGED,
        suffix: "paged",
        ..PREFILL
    },
    Family {
        defines: RAGGED,
        suffix: "ragged",
        ..PREFILL
    },
];

/// Tiles of K and V are filled page by page.
const PAGED: &[&str] = &["FOLIO_PAGED=1"];
/// Tiles of K and V are filled from consecutive rows.
const RAGGED: &[&str] = &["FOLIO_PAGED=0"];

const PREFILL: Family = Family {
    op: Op::Prefill,
    arch: Arch::Sm90a,
    source: "sm90/prefill/prefill.cu",
    symbol: "folio_prefill_sm90",
    defines: PAGED,
    suffix: "",
    types: &[same(DType::BF16), same(DType::F16)],
    any_output: false,
    shapes: &[
        shape(64, 64, 192, 128),
        shape(128, 128, 192, 80),
        shape(128, 128, 128, 128),
        shape(192, 128, 128, 128),
        shape(256, 256, 128, 80),
    ],
    fit: Fit::Exact,
    shared_bytes,
    bundled: true,
};

const fn shape(head_dim_qk: u32, head_dim_vo: u32, q_tile: u32, kv_tile: u32) -> Shape {
    Shape {
        head_dim_qk,
        head_dim_vo,
        q_tile,
        kv_tile,
        // A warpgroup of 128 threads for every 64 query rows, and one that loads.
        threads: 128 * (q_tile / 64 + 1),
    }
}

/// Stages of K and V, one or two of Q, and 1024 bytes of barriers and tile records; the kernel asserts
/// that it comes to the same.
fn shared_bytes(_: Types, shape: Shape) -> u32 {
    const MOST: u32 = 232_448 - 1024;
    let stages = match (shape.head_dim_qk, shape.q_tile) {
        (64, _) => 4,
        (_, 192) => 3,
        _ => 2,
    };
    let cache = stages * shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo) * 2;
    let queries = shape.q_tile * shape.head_dim_qk * 2;
    let query_stages = if cache + 2 * queries <= MOST { 2 } else { 1 };
    cache + query_stages * queries + 1024
}
