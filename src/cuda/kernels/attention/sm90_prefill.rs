//! Rows of the Hopper prefill kernels.

use super::row::{
    AttentionTypes, Family, Fit, HALF, HALF_TO_F32, KvRows, MOST_HEAD_DIM, Phase, Shape, Variant,
    cached,
};
use crate::cuda::kernels::row::Arch;
use crate::dtype::DType;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        shapes: &WHOLE_BLOCKS,
        fit: Fit::Exact,
        ..whole_keys(KvRows::Paged)
    },
    Family {
        shapes: &WITHIN_BLOCKS,
        ..whole_keys(KvRows::PagedColumns)
    },
    whole_keys(KvRows::Ragged),
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
        },
        symbol: "folio_prefill_sm90_split_keys",
        shapes: &[MLA],
        // Where the two parts of a key meet is compiled in.
        fit: Fit::Exact,
        ..whole_keys(kv)
    }
}

const fn rows() -> Family {
    Family {
        shapes: &ONE_BY_ONE,
        fit: Fit::Exact,
        symbol: "folio_prefill_sm90_rows",
        ..whole_keys(KvRows::Rows)
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
const SHAPES: [Shape; 12] = [
    D64, D80, D96, D112, D128, D128_SHORT, D144, MLA, D160, D192, D224, D256,
];

/// Problems whose rows are these, as they are.
const WHOLE_BLOCKS: [Shape; 6] = [D64, D128, D128_SHORT, MLA, D192, D256];

/// For rows that are loaded one by one.
const ONE_BY_ONE: [Shape; 5] = [D64, D128, D128_SHORT, MLA, D256];

/// For pages of all others.
const WITHIN_BLOCKS: [Shape; 10] = [D64, D80, D96, D112, D128, D144, D160, D192, D224, D256];

const D64: Shape = shape(64, 64, 192, 128);
const D80: Shape = shape(80, 80, 192, 112);
const D96: Shape = shape(96, 96, 192, 112);
const D112: Shape = shape(112, 112, 192, 96);
const D128: Shape = shape(128, 128, 192, 80);
const D128_SHORT: Shape = shape(128, 128, 128, 128);
const D144: Shape = shape(144, 144, 192, 64);
const D160: Shape = shape(160, 160, 192, 64);
const D192: Shape = shape(192, 192, 128, 112);
const D224: Shape = shape(224, 224, 128, 80);
const D256: Shape = shape(MOST_HEAD_DIM, MOST_HEAD_DIM, 128, 80);

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

/// One or two buffers of Q, two to four stages of K and V, two steps of what is converted, and 1024 bytes of barriers and tile
/// records. Rows lie in blocks of 64 columns. The kernel computes the same (`tile.cuh`), and asserts it. fp8 values are
/// converted to fp16, and keys where queries are fp16; bf16 queries are split.
fn shared_bytes(types: AttentionTypes, shape: Shape) -> u32 {
    const MOST: u32 = 232_448 - 1024;
    let converts = types.kv != types.q;
    let splits = converts && types.q == DType::BF16;
    let row = |dim: u32| dim.next_multiple_of(64);
    let keys = shape.kv_tile * row(shape.head_dim_qk);
    let values = shape.kv_tile * row(shape.head_dim_vo);
    let step = if splits { keys } else { 2 * keys } + 2 * values;
    let raw = match (converts, splits) {
        (false, _) => 0,
        (true, false) => 2 * (keys + values),
        (true, true) => 2 * values,
    };
    let queries = shape.q_tile * row(shape.head_dim_qk) * 2;
    let most = MOST - raw;
    let query_stages = if 2 * queries + 2 * step <= most { 2 } else { 1 };
    let stages = ((most - query_stages * queries) / step).min(4);
    query_stages * queries + stages * step + raw + 1024
}
