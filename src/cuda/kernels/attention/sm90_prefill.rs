//! Rows of the Hopper prefill kernels.

use super::row::{
    AttentionTypes, Family, Fit, HALF, HALF_TO_F32, KvRows, MOST_HEAD_DIM, Masks, Phase, Shape,
    Variant, cached,
};
use crate::cuda::kernels::row::Arch;
use crate::dtype::DType;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    whole_keys(KvRows::Paged),
    whole_keys(KvRows::Ragged),
    masked(KvRows::Paged),
    masked(KvRows::Ragged),
    rows(),
    // fp8 values, converted when they are loaded; keys too where queries are fp16.
    Family {
        types: &[
            cached(DType::BF16, DType::F8E4M3),
            cached(DType::BF16, DType::F8E5M2),
        ],
        shapes: &SPLITTING,
        ..rows()
    },
    Family {
        types: &[
            cached(DType::F16, DType::F8E4M3),
            cached(DType::F16, DType::F8E5M2),
        ],
        shapes: &CONVERTING,
        ..rows()
    },
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
            masks: Masks::ByPosition,
        },
        symbol: "folio_prefill_sm90_split_keys",
        shapes: &[MLA],
        ..whole_keys(kv)
    }
}

const fn rows() -> Family {
    Family {
        symbol: "folio_prefill_sm90_rows",
        ..whole_keys(KvRows::Rows)
    }
}

const fn whole_keys(kv: KvRows) -> Family {
    Family {
        phase: Phase::Prefill,
        variant: Variant::Sm90Prefill {
            kv,
            rope_dim: 0,
            masks: Masks::ByPosition,
        },
        arch: Arch::Sm90a,
        source: "sm90/prefill/prefill.cu",
        symbol: "folio_prefill_sm90",
        types: HALF,
        any_output: false,
        shapes: &SHAPES,
        fit: Fit::Exact,
        shared_bytes,
        bundled: true,
    }
}

/// Runs with masks that do not follow from positions take these beside those of [`whole_keys`], on the same work items.
const fn masked(kv: KvRows) -> Family {
    Family {
        variant: Variant::Sm90Prefill {
            kv,
            rope_dim: 0,
            masks: Masks::Any,
        },
        symbol: "folio_prefill_sm90_masked",
        shapes: &MASKED_SHAPES,
        shared_bytes: masked_shared_bytes,
        ..whole_keys(kv)
    }
}

const SHAPES: [Shape; 5] = [
    shape(64, 64, 192, 128),
    shape(128, 128, 192, 80),
    shape(128, 128, 128, 128),
    MLA,
    shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 80),
];

/// With the query tiles of [`SHAPES`]. Masks take registers, and where those are full, steps have fewer keys.
const MASKED_SHAPES: [Shape; 5] = [
    shape(64, 64, 192, 64),
    shape(128, 128, 192, 64),
    shape(128, 128, 128, 128),
    MLA,
    shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 64),
];

/// Beside the tiles there are rows that are not converted yet. Those who load need registers, so that steps are shorter.
const SPLITTING: [Shape; 4] = [
    shape(64, 64, 192, 80),
    shape(128, 128, 192, 80),
    shape(192, 128, 128, 80),
    shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 64),
];

/// As above, with keys that are converted.
const CONVERTING: [Shape; 4] = [
    SPLITTING[0],
    SPLITTING[1],
    SPLITTING[2],
    shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 48),
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

/// Stages of K and V, two steps of what is converted, one or two stages of Q, and 1024 bytes of barriers and tile records;
/// the kernel asserts that it comes to the same. fp8 values are converted to fp16, and keys where queries are fp16; bf16
/// queries are split.
fn shared_bytes(types: AttentionTypes, shape: Shape) -> u32 {
    const MOST: u32 = 232_448 - 1024;
    let converts = types.kv != types.q;
    let splits = converts && types.q == DType::BF16;
    let stages = match (shape.head_dim_qk, shape.q_tile) {
        (64, _) => 4,
        (_, 192) if splits || !converts => 3,
        _ => 2,
    };
    let (keys, values) = (
        shape.kv_tile * shape.head_dim_qk,
        shape.kv_tile * shape.head_dim_vo,
    );
    let staged = if splits { keys } else { 2 * keys } + 2 * values;
    let raw = match (converts, splits) {
        (false, _) => 0,
        (true, false) => keys + values,
        (true, true) => values,
    };
    let cache = stages * staged + 2 * raw;
    let queries = shape.q_tile * shape.head_dim_qk * 2;
    let query_stages = if cache + 2 * queries <= MOST { 2 } else { 1 };
    cache + query_stages * queries + 1024
}

/// A row's mask by 16 bytes, for as many rows as words of 32 keys are a thread's, and the slopes of two rows, for every
/// thread that multiplies.
fn masked_shared_bytes(types: AttentionTypes, shape: Shape) -> u32 {
    let rows_of_thread = if shape.kv_tile <= 64 { 1 } else { 2 };
    shared_bytes(types, shape) + (16 * rows_of_thread + 8) * 2 * shape.q_tile
}
