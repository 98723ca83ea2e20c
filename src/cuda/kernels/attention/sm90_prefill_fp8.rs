//! Rows of the Hopper prefill kernel whose products are all in e4m3.

use super::row::{AttentionTypes, Family, Fit, Phase, Shape, Variant, same};
use crate::cuda::kernels::row::Arch;
use crate::dtype::DType;

/// All families.
pub(super) const FAMILIES: &[Family] = &[Family {
    phase: Phase::Prefill,
    variant: Variant::Sm90PrefillFp8,
    arch: Arch::Sm90a,
    source: "sm90/prefill_fp8/prefill_fp8.cu",
    symbol: "folio_prefill_fp8_sm90",
    types: &[same(DType::F8E4M3)],
    any_output: true,
    shapes: &[Shape {
        head_dim_qk: 128,
        head_dim_vo: 128,
        q_tile: 192,
        kv_tile: 96,
        // Three warpgroups of 64 query rows, and one that loads and transposes.
        threads: 512,
    }],
    fit: Fit::Exact,
    shared_bytes,
    bundled: true,
}];

/// Two stages of queries, keys, values as loaded and values transposed (a pitch of 128 keys, and 8 rows of ones), sums in
/// fp32, and 1024 bytes of barriers and tile records; the kernel asserts that it comes to the same.
fn shared_bytes(_: AttentionTypes, shape: Shape) -> u32 {
    let queries = shape.q_tile * shape.head_dim_qk;
    let block = shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo);
    let transposed = (shape.head_dim_vo + 8) * 128;
    let sums = shape.q_tile * shape.head_dim_vo * 4;
    2 * (queries + block + transposed) + sums + 1024
}
