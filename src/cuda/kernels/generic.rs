//! Rows of the portable kernels, sm_80 and up: complete for the contract, and what every problem falls
//! back to.

use super::{Arch, Family, Fit, Op, Shape, Types, same};
use crate::dtype::DType;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[Family {
    op: Op::Decode,
    arch: Arch::Sm80,
    source: "attention.cu",
    symbol: "folio_attention",
    defines: &[],
    suffix: "",
    types: &[same(DType::BF16), same(DType::F16)],
    any_output: true,
    shapes: &[shape(64, 16, 64), shape(128, 16, 64), shape(256, 16, 32)],
    fit: Fit::UpTo,
    shared_bytes,
    bundled: true,
}];

const fn shape(head_dim: u32, q_tile: u32, kv_tile: u32) -> Shape {
    Shape {
        head_dim_qk: head_dim,
        head_dim_vo: head_dim,
        q_tile,
        kv_tile,
        threads: 128,
    }
}

/// Two stages of keys and values.
fn shared_bytes(types: Types, shape: Shape) -> u32 {
    2 * shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo) * types.kv.size() as u32
}
