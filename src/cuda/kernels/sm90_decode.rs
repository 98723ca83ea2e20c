//! Rows of the Hopper decode kernels.

use super::{Arch, Family, Fit, Op, Shape, Types, same};
use crate::dtype::DType;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[Family {
    op: Op::Decode,
    arch: Arch::Sm90a,
    source: "sm90/decode.cu",
    symbol: "folio_decode_sm90",
    defines: &[],
    suffix: "",
    types: &[same(DType::BF16), same(DType::F16)],
    any_output: true,
    shapes: &[Shape {
        head_dim_qk: 128,
        head_dim_vo: 128,
        q_tile: 16,
        kv_tile: 64,
        threads: 128,
    }],
    fit: Fit::Exact,
    shared_bytes,
    bundled: true,
}];

/// Three stages of keys and values.
fn shared_bytes(types: Types, shape: Shape) -> u32 {
    3 * shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo) * types.kv.size() as u32
}
