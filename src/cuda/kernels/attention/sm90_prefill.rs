//! Rows of the Hopper prefill kernels.

use super::row::{
    AttentionTypes, Family, Fit, HALF, HALF_TO_F32, KvRows, MOST_HEAD_DIM, Phase, Shape, Variant,
};
use crate::cuda::kernels::row::Arch;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    whole_keys(KvRows::Paged),
    whole_keys(KvRows::Ragged),
    split_keys(KvRows::Paged),
    split_keys(KvRows::Ragged),
    // Parts of a context, whose outputs are merged.
    Family {
        types: HALF_TO_F32,
        ..split_keys(KvRows::Ragged)
    },
];

/// The rotary part of keys in two parts, which is DeepSeek's.
pub const SPLIT_ROPE_DIM: u32 = 64;

const fn split_keys(kv: KvRows) -> Family {
    Family {
        variant: Variant::Sm90Prefill {
            kv,
            rope_dim: SPLIT_ROPE_DIM,
        },
        symbol: "folio_prefill_sm90_split_keys",
        shapes: &[MLA],
        // Where the two parts of a key meet is compiled in.
        fit: Fit::Exact,
        ..whole_keys(kv)
    }
}

const fn whole_keys(kv: KvRows) -> Family {
    Family {
        phase: Phase::Prefill,
        variant: Variant::Sm90Prefill { kv, rope_dim: 0 },
        arch: Arch::Sm90a,
        source: "sm90/prefill/prefill.cu",
        symbol: "folio_prefill_sm90",
        types: HALF,
        any_output: false,
        shapes: &SHAPES,
        fit: Fit::UpTo,
        shared_bytes,
        bundled: true,
    }
}

/// The cheapest first: a problem takes the first that it fits in, and is multiplied as if it were as wide. Three
/// consumer warpgroups of 160 registers hold DIM_VO / 2 of the output and 3 / 4 of a step's keys, up to 132 in all; two of
/// 232 hold up to 192.
const SHAPES: [Shape; 11] = [
    shape(64, 64, 192, 128),
    shape(80, 80, 192, 112),
    shape(96, 96, 192, 112),
    shape(112, 112, 192, 96),
    shape(128, 128, 192, 80),
    shape(128, 128, 128, 128),
    MLA,
    shape(160, 160, 192, 64),
    shape(192, 192, 128, 112),
    shape(224, 224, 128, 80),
    shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 80),
];

/// Queries and keys of 128 elements and a rotary part of 64: MLA in its multi-head form.
const MLA: Shape = shape(192, 128, 128, 128);

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

/// One or two buffers of Q, two to four stages of K and V, and 1024 bytes of barriers and tile records. Rows lie in blocks
/// of 64 columns. The kernel computes the same (`tile.cuh`), and asserts it.
fn shared_bytes(_: AttentionTypes, shape: Shape) -> u32 {
    const MOST: u32 = 232_448 - 1024;
    let row_bytes = |dim: u32| dim.next_multiple_of(64) * 2;
    let queries = shape.q_tile * row_bytes(shape.head_dim_qk);
    let step = shape.kv_tile * (row_bytes(shape.head_dim_qk) + row_bytes(shape.head_dim_vo));
    let query_stages = if 2 * queries + 2 * step <= MOST { 2 } else { 1 };
    let stages = ((MOST - query_stages * queries) / step).min(4);
    query_stages * queries + stages * step + 1024
}
