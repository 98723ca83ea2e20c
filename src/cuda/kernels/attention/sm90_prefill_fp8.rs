//! Rows of the Hopper prefill kernel whose products are all in e4m3.

use super::row::{AttentionTypes, Family, Fit, KeySource, Phase, Shape, Variant, same};
use crate::cuda::kernels::row::Arch;
use crate::dtype::DType;

/// All families.
pub(super) const FAMILIES: &[Family] = &[family(KeySource::Tma), family(KeySource::Gather)];

const TYPES: &[AttentionTypes] = &[same(DType::F8E4M3)];

/// Of four warpgroups three have 64 query rows each, and one loads and transposes; at head_dim 256 two and two.
const SHAPES: &[Shape] = &[
    shape(64, 192, 128),
    shape(128, 192, 96),
    shape(256, 128, 64),
];

const fn family(keys: KeySource) -> Family {
    Family {
        phase: Phase::Prefill,
        variant: Variant::Sm90PrefillFp8 { keys },
        arch: Arch::Sm90a,
        source: "sm90/prefill_fp8/prefill_fp8.cu",
        symbol: match keys {
            KeySource::Tma => "folio_prefill_fp8_sm90",
            KeySource::Gather => "folio_prefill_fp8_sm90_rows",
        },
        types: TYPES,
        any_output: true,
        shapes: SHAPES,
        fit: Fit::UpTo,
        shared_bytes,
        bundled: true,
    }
}

const fn shape(head_dim: u32, q_tile: u32, kv_tile: u32) -> Shape {
    Shape {
        head_dim_qk: head_dim,
        head_dim_vo: head_dim,
        q_tile,
        kv_tile,
        threads: 512,
    }
}

/// Two stages of queries, keys, values as loaded and values transposed (a pitch of 128 keys, and 8 rows of ones), sums, and
/// 1024 bytes of barriers and tile records; the kernel asserts that it comes to the same.
fn shared_bytes(_: AttentionTypes, shape: Shape) -> u32 {
    let queries = shape.q_tile * shape.head_dim_qk;
    let block = shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo);
    // Two short stages are two halves of the same rows.
    let pitches = if shape.kv_tile <= 64 { 1 } else { 2 };
    let transposed = pitches * (shape.head_dim_vo + 8) * 128;
    // Where fp32 leaves no room they are means in fp16.
    let of_sum = if shape.head_dim_vo <= 128 { 4 } else { 2 };
    let sums = shape.q_tile * shape.head_dim_vo * of_sum;
    2 * (queries + block) + transposed + sums + 1024
}
