//! Rows of the Hopper decode kernels. Each comes twice, with keys brought by TMA and gathered row by row.
//!
//! Rows of at most 192 bytes are read for two KV heads at a time, as neighbours in memory; longer ones are
//! as fast one by one. Eight packed query rows fill an instruction: every further eight take as many
//! registers again.
//!
//! A problem takes the narrowest row that it fits in, whose columns beyond the problem's are not read. Rows of
//! their own have the head dims whose last swizzle atom would be half empty in the next one (64 × 4k on an
//! H200: head_dim 96 takes 205 µs, in the row of 128 268).

use super::row::{
    AttentionTypes, Family, Fit, HALF, HALF_FP8, KeySource, MOST_HEAD_DIM, Phase, Shape, Variant,
};
use crate::cuda::kernels::row::Arch;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    by_tma(PAIRS_HALF),
    by_tma(PAIRS_FP8),
    by_tma(SINGLE_HALF),
    by_tma(SIXTEEN_ROWS_HALF),
    by_tma(SIXTEEN_ROWS_FP8),
    by_tma(MANY_ROWS_HALF),
    by_tma(MANY_ROWS_FP8),
    PAIRS_HALF,
    PAIRS_FP8,
    SINGLE_HALF,
    SIXTEEN_ROWS_HALF,
    SIXTEEN_ROWS_FP8,
    MANY_ROWS_HALF,
    MANY_ROWS_FP8,
];

const PAIRS_HALF: Family = Family {
    phase: Phase::Decode,
    variant: gathered(2),
    arch: Arch::Sm90a,
    source: "sm90/decode/decode.cu",
    symbol: "folio_sm90_decode_gather",
    types: HALF,
    any_output: true,
    shapes: &[
        shape((64, 64), 8, 16, 4),
        shape((80, 80), 8, 16, 4),
        shape((96, 96), 8, 16, 4),
    ],
    fit: Fit::UpTo,
    shared_bytes: shared_bytes::<2>,
    bundled: true,
};

const PAIRS_FP8: Family = Family {
    types: HALF_FP8,
    shapes: &[
        shape((64, 64), 8, 16, 4),
        shape((96, 96), 8, 16, 4),
        shape((128, 128), 8, 16, 4),
        // Also for (192, 128), for whose pairs of heads registers do not suffice.
        shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 8, 16, 3),
    ],
    ..PAIRS_HALF
};

const SINGLE_HALF: Family = Family {
    variant: gathered(1),
    shapes: &[
        shape((112, 112), 8, 16, 4),
        shape((128, 128), 8, 16, 4),
        shape((160, 160), 8, 16, 4),
        shape((192, 128), 8, 16, 4),
        shape((224, 224), 8, 16, 3),
        shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 8, 16, 3),
    ],
    shared_bytes: shared_bytes::<1>,
    ..PAIRS_HALF
};

const SIXTEEN_ROWS_HALF: Family = Family {
    shapes: &[
        shape((64, 64), 16, 32, 4),
        shape((128, 128), 16, 16, 4),
        shape((192, 128), 16, 16, 4),
        shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 16, 16, 3),
    ],
    ..SINGLE_HALF
};

const SIXTEEN_ROWS_FP8: Family = Family {
    types: HALF_FP8,
    shapes: &[
        shape((64, 64), 16, 32, 4),
        shape((128, 128), 16, 32, 4),
        shape((192, 128), 16, 16, 4),
        shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 16, 16, 4),
    ],
    ..SINGLE_HALF
};

/// A warp has registers for 32 rows of up to 128 columns, or for 16 of 256: where there are more rows, warps share keys.
const MANY_ROWS_HALF: Family = Family {
    shapes: &[
        shape((128, 128), 32, 16, 4),
        shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 32, 16, 4),
        shape((128, 128), 64, 16, 4),
        shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 64, 16, 4),
    ],
    ..SINGLE_HALF
};

const MANY_ROWS_FP8: Family = Family {
    types: HALF_FP8,
    ..MANY_ROWS_HALF
};

/// So many KV heads of a block, neighbours where they are two.
const fn gathered(heads: u32) -> Variant {
    Variant::Sm90Decode {
        keys: KeySource::Gather,
        heads,
    }
}

/// The family with keys brought by TMA.
const fn by_tma(family: Family) -> Family {
    let Variant::Sm90Decode { heads, .. } = family.variant else {
        panic!("not a family of this kernel");
    };
    Family {
        variant: Variant::Sm90Decode {
            keys: KeySource::Tma,
            heads,
        },
        symbol: "folio_sm90_decode_tma",
        ..family
    }
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

/// Rings of two stages and more for every warp, or for the warps that read the same keys; barriers, the warps' softmax sums, and queries where
/// registers do not hold them. The kernel asserts that it comes to the same.
fn shared_bytes<const HEADS: u32>(types: AttentionTypes, shape: Shape) -> u32 {
    let warps = shape.threads / 32;
    let widest = shape.head_dim_qk.max(shape.head_dim_vo);
    let warp_rows = shape.q_tile.min(if widest <= 128 { 32 } else { 16 });
    let rings = warps * warp_rows / shape.q_tile;
    let sums = warps * HEADS * warp_rows * 8;
    let queries = match (shape.head_dim_qk, warp_rows) {
        (..=192, ..=16) => 0,
        (dim, _) => HEADS * shape.q_tile * dim * 2,
    };
    // Two blocks are to have room on a multiprocessor.
    let room = (96 * 1024).min(113 * 1024 - 128 - sums - queries);
    let stage =
        HEADS * shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo) * types.kv.size() as u32;
    let stages = room / (rings * stage);
    let barriers = (rings * stages * 8).next_multiple_of(16);
    rings * stages * stage + barriers + sums + queries
}
