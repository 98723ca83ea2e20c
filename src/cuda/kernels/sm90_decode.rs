//! Rows of the Hopper decode kernels. Each comes twice, with keys brought by TMA and gathered row by row.
//!
//! Rows of at most 128 bytes are read for two KV heads at a time, as neighbours in memory; longer ones are
//! as fast one by one. Eight packed query rows fill an instruction: more take twice the registers.

use super::row::{Arch, Family, Fit, Op, Shape, Types, same};
use crate::dtype::DType;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    by_tma(PAIRS_HALF),
    by_tma(PAIRS_FP8),
    by_tma(SINGLE_HALF),
    by_tma(SIXTEEN_ROWS_HALF),
    by_tma(SIXTEEN_ROWS_FP8),
    PAIRS_HALF,
    PAIRS_FP8,
    SINGLE_HALF,
    SIXTEEN_ROWS_HALF,
    SIXTEEN_ROWS_FP8,
];

/// One KV head of a block, or two neighbours.
const ONE_HEAD: &[&str] = &["FOLIO_DECODE_HEADS=1"];
const TWO_HEADS: &[&str] = &["FOLIO_DECODE_HEADS=2"];

const PAIRS_HALF: Family = Family {
    op: Op::Decode,
    arch: Arch::Sm90a,
    source: "sm90/decode/decode.cu",
    symbol: "folio_sm90_decode_gather",
    defines: TWO_HEADS,
    suffix: "gather",
    types: HALF,
    any_output: true,
    shapes: &[shape((64, 64), 8, 16, 4)],
    fit: Fit::Exact,
    shared_bytes: shared_bytes::<2>,
    bundled: true,
};

const PAIRS_FP8: Family = Family {
    types: FP8,
    shapes: &[
        shape((64, 64), 8, 16, 4),
        shape((128, 128), 8, 16, 4),
        shape((192, 128), 8, 16, 4),
        shape((256, 256), 8, 16, 3),
    ],
    ..PAIRS_HALF
};

const SINGLE_HALF: Family = Family {
    defines: ONE_HEAD,
    shapes: &[
        shape((128, 128), 8, 16, 4),
        shape((192, 128), 8, 16, 4),
        shape((256, 256), 8, 16, 3),
    ],
    shared_bytes: shared_bytes::<1>,
    ..PAIRS_HALF
};

const SIXTEEN_ROWS_HALF: Family = Family {
    shapes: &[
        shape((64, 64), 16, 32, 4),
        shape((128, 128), 16, 16, 4),
        shape((192, 128), 16, 16, 4),
        shape((256, 256), 16, 16, 3),
    ],
    ..SINGLE_HALF
};

const SIXTEEN_ROWS_FP8: Family = Family {
    types: FP8,
    shapes: &[
        shape((64, 64), 16, 32, 4),
        shape((128, 128), 16, 32, 4),
        shape((192, 128), 16, 16, 4),
        shape((256, 256), 16, 16, 4),
    ],
    ..SINGLE_HALF
};

const HALF: &[Types] = &[same(DType::BF16), same(DType::F16)];

const FP8: &[Types] = &[
    cached(DType::BF16, DType::F8E4M3),
    cached(DType::F16, DType::F8E4M3),
    cached(DType::BF16, DType::F8E5M2),
    cached(DType::F16, DType::F8E5M2),
];

const fn by_tma(family: Family) -> Family {
    Family {
        symbol: "folio_sm90_decode_tma",
        suffix: "tma",
        ..family
    }
}

const fn cached(q: DType, kv: DType) -> Types {
    Types { q, kv, o: q }
}

/// `kv_tile` keys for each of so many warps.
const fn shape(dims: (u32, u32), q_tile: u32, kv_tile: u32, warps: u32) -> Shape {
    Shape {
        head_dim_qk: dims.0,
        head_dim_vo: dims.1,
        q_tile,
        kv_tile,
        threads: 32 * warps,
    }
}

/// Rings of two to four stages for each warp, barriers, the warps' softmax sums, and queries where
/// registers do not hold them. The kernel asserts that it comes to the same.
fn shared_bytes<const HEADS: u32>(types: Types, shape: Shape) -> u32 {
    let warps = shape.threads / 32;
    let stage =
        HEADS * shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo) * types.kv.size() as u32;
    let stages = (96 * 1024 / (warps * stage)).min(4);
    let barriers = (warps * stages * 8).next_multiple_of(16);
    let sums = warps * HEADS * shape.q_tile * 8;
    let queries = match shape.head_dim_qk {
        ..=192 => 0,
        dim => HEADS * shape.q_tile * dim * 2,
    };
    warps * stages * stage + barriers + sums + queries
}
