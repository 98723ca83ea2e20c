//! Rows of the Hopper decode kernels. Most come twice, with keys brought by TMA and gathered row by row.
//!
//! Rows of at most 224 bytes are read for two KV heads at a time, as neighbours in memory; longer ones are
//! as fast one by one. Eight packed query rows fill an instruction: every further eight take as many
//! registers again.
//!
//! Over elements of 8 bits or less queries become fp16 when they are loaded, so that one row serves all their types.
//!
//! A problem takes the narrowest row that it fits in, whose columns beyond the problem's are not read. Rows of
//! their own by TMA have the head dims whose last swizzle atom would be half empty in the next one (64 × 4k on an
//! H200: head_dim 96 takes 205 µs, in the row of 128 268). Gathered rows of atoms of 32 bytes would lie in the same banks:
//! the next row is faster (head_dim 80: 199 against 226 µs).

use super::row::{
    AttentionTypes, CacheScales, F16_FP8, Family, Fit, HALF, KeySource, MOST_HEAD_DIM, Phase,
    Products, Shape, Tokens, Variant, cached,
};
use crate::cuda::kernels::row::Arch;
use crate::dtype::DType;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    by_tma(PAIRS_HALF),
    PAIRS_HALF_BY_TMA_ALONE,
    by_tma(PAIRS_FP8),
    PAIRS_FP8_BY_TMA_ALONE,
    by_tma(SINGLE_HALF),
    by_tma(SIXTEEN_ROWS_HALF),
    by_tma(WARPGROUP_FP8),
    by_tma(SIXTEEN_ROWS_FP8),
    by_tma(MANY_ROWS_FP8),
    PAIRS_HALF,
    PAIRS_FP8,
    SINGLE_HALF,
    SIXTEEN_ROWS_HALF,
    WARPGROUP_FP8,
    SIXTEEN_ROWS_FP8,
    MANY_ROWS_FP8,
    by_tma(PAIRS_BY_TOKEN),
    by_tma(ROWS_BY_TOKEN),
    by_tma(PAIRS_BY_CHANNEL),
    by_tma(ROWS_BY_CHANNEL),
    by_tma(PAIRS_WITH_ZERO_POINTS),
    WIDE_PAIRS_WITH_ZERO_POINTS,
    by_tma(ROWS_WITH_ZERO_POINTS),
    by_tma(PAIRS_BY_BLOCK),
    by_tma(ROWS_BY_BLOCK),
    PAIRS_BY_TOKEN,
    ROWS_BY_TOKEN,
    PAIRS_BY_CHANNEL,
    ROWS_BY_CHANNEL,
    PAIRS_WITH_ZERO_POINTS,
    NARROW_PAIRS_WITH_ZERO_POINTS,
    ROWS_WITH_ZERO_POINTS,
    PAIRS_BY_BLOCK,
    ROWS_BY_BLOCK,
    with_new_tokens(PAIRS_HALF, &[PAIRS_OF_64]),
    with_new_tokens(PAIRS_FP8, &[PAIRS_OF_64, PAIRS_OF_128]),
    with_new_tokens(SINGLE_HALF, &[ROWS_OF_128, ROWS_OF_256]),
    with_new_tokens(SIXTEEN_ROWS_HALF, &[SIXTEEN_OF_64, SIXTEEN_OF_128]),
];

/// Shapes that [`with_new_tokens`] names too.
const PAIRS_OF_64: Shape = shape((64, 64), 8, 16, 4);
const PAIRS_OF_128: Shape = shape((128, 128), 8, 16, 4);
const ROWS_OF_128: Shape = shape((128, 128), 8, 16, 4);
const ROWS_OF_256: Shape = shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 8, 16, 3);
const SIXTEEN_OF_64: Shape = shape((64, 64), 16, 32, 4);
const SIXTEEN_OF_128: Shape = shape((128, 128), 16, 16, 4);

const PAIRS_HALF: Family = Family {
    phase: Phase::Decode,
    variant: gathered(2),
    arch: Arch::Sm90a,
    source: "sm90/decode/decode.cu",
    symbol: "folio_sm90_decode_gather",
    types: HALF,
    any_output: true,
    shapes: &[PAIRS_OF_64, shape((96, 96), 8, 16, 4)],
    fit: Fit::UpTo,
    shared_bytes: shared_bytes::<2>,
    bundled: true,
};

/// Atoms of 32 bytes.
const PAIRS_HALF_BY_TMA_ALONE: Family = Family {
    shapes: &[
        shape((80, 80), 8, 16, 4),
        // Four warps have no room for two stages each.
        shape((112, 112), 8, 16, 3),
    ],
    ..alone(by_tma(PAIRS_HALF))
};

const PAIRS_FP8: Family = Family {
    types: F16_FP8,
    shapes: &[
        PAIRS_OF_64,
        PAIRS_OF_128,
        // Also for (192, 128), for whose pairs of heads registers do not suffice.
        shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 8, 16, 3),
    ],
    ..PAIRS_HALF
};

/// Atoms of 32 bytes.
const PAIRS_FP8_BY_TMA_ALONE: Family = Family {
    shapes: &[shape((96, 96), 8, 16, 4)],
    ..alone(by_tma(PAIRS_FP8))
};

const SINGLE_HALF: Family = Family {
    variant: gathered(1),
    shapes: &[
        ROWS_OF_128,
        shape((160, 160), 8, 16, 4),
        shape((192, 128), 8, 16, 4),
        shape((224, 224), 8, 16, 3),
        ROWS_OF_256,
    ],
    shared_bytes: shared_bytes::<1>,
    ..PAIRS_HALF
};

/// More rows over keys of 16 bits, and as many of more columns, are prefill's.
const SIXTEEN_ROWS_HALF: Family = Family {
    shapes: &[SIXTEEN_OF_64, SIXTEEN_OF_128],
    ..SINGLE_HALF
};

const SIXTEEN_ROWS_FP8: Family = Family {
    types: F16_FP8,
    shapes: &[
        shape((64, 64), 16, 32, 4),
        shape((128, 128), 16, 32, 4),
        shape((192, 128), 16, 16, 4),
        shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 16, 16, 4),
    ],
    ..SINGLE_HALF
};

/// More than eight rows of up to 128 columns: warps that multiply together convert every key once, and take masks by position
/// alone.
const WARPGROUP_FP8: Family = Family {
    variant: Variant::Sm90Decode {
        keys: KeySource::Gather,
        heads: 1,
        scales: CacheScales::Heads,
        products: Products::OfWarpgroup,
        tokens: Tokens::Cached,
        is_alone: false,
    },
    source: "sm90/decode_warpgroup/decode_warpgroup.cu",
    symbol: "folio_sm90_decode_warpgroup_gather",
    types: F16_FP8,
    shapes: &[
        shape((64, 64), 16, 128, 8),
        shape((128, 128), 16, 64, 8),
        shape((64, 64), 32, 128, 8),
        shape((128, 128), 32, 64, 8),
        shape((64, 64), 64, 64, 8),
        shape((128, 128), 64, 64, 8),
    ],
    shared_bytes: warpgroup_bytes,
    ..SINGLE_HALF
};

/// Outputs of 256 columns leave those no registers. A warp has them for 16 rows of so many: of more rows, warps share keys. Still more
/// are prefill's.
const MANY_ROWS_FP8: Family = Family {
    types: F16_FP8,
    shapes: &[shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 32, 16, 4)],
    ..SINGLE_HALF
};

/// Caches with scales of their own, whose rows are narrow.
const PAIRS_BY_TOKEN: Family = Family {
    variant: gathered_stored(2, CacheScales::Tokens),
    types: &[
        cached(DType::F16, DType::I8),
        cached(DType::F16, DType::F8E4M3),
    ],
    shapes: &[shape((64, 64), 8, 16, 4), shape((128, 128), 8, 16, 4)],
    shared_bytes: stored_bytes::<2, 1, BYTES_OF_TOKEN>,
    ..PAIRS_HALF
};

const ROWS_BY_TOKEN: Family = Family {
    variant: gathered_stored(1, CacheScales::Tokens),
    shapes: &[
        shape((64, 64), 16, 32, 4),
        shape((128, 128), 16, 32, 4),
        shape((128, 128), 32, 16, 4),
        shape((128, 128), 64, 16, 4),
    ],
    shared_bytes: stored_bytes::<1, 1, BYTES_OF_TOKEN>,
    ..PAIRS_BY_TOKEN
};

/// Queries times scales are sums of two numbers.
const PAIRS_BY_CHANNEL: Family = Family {
    variant: gathered_stored(2, CacheScales::Channels),
    types: &[cached(DType::F16, DType::I8)],
    shared_bytes: stored_bytes::<2, 2, 0>,
    ..PAIRS_BY_TOKEN
};

const ROWS_BY_CHANNEL: Family = Family {
    variant: gathered_stored(1, CacheScales::Channels),
    types: PAIRS_BY_CHANNEL.types,
    shared_bytes: stored_bytes::<1, 2, 0>,
    ..ROWS_BY_TOKEN
};

const PAIRS_WITH_ZERO_POINTS: Family = Family {
    variant: gathered_stored(2, CacheScales::ZeroPoints),
    types: &[cached(DType::F16, DType::I4x2)],
    shapes: &[shape((64, 64), 8, 32, 4)],
    ..PAIRS_BY_CHANNEL
};

/// Rows of nibbles are so short that what a tile costs beside its products decides: tiles of 32 tokens, for which gathered rows
/// of 128 columns have no registers.
const WIDE_PAIRS_WITH_ZERO_POINTS: Family = Family {
    shapes: &[shape((128, 128), 8, 32, 4)],
    ..alone(by_tma(PAIRS_WITH_ZERO_POINTS))
};

const NARROW_PAIRS_WITH_ZERO_POINTS: Family = Family {
    shapes: &[shape((128, 128), 8, 16, 4)],
    ..alone(PAIRS_WITH_ZERO_POINTS)
};

const ROWS_WITH_ZERO_POINTS: Family = Family {
    variant: gathered_stored(1, CacheScales::ZeroPoints),
    types: PAIRS_WITH_ZERO_POINTS.types,
    ..ROWS_BY_CHANNEL
};

/// Elements take twice the instructions of int4's. At head_dim 128 six warps have no registers, and more of one head each are no
/// faster (64 × 4k on an H200: 119 µs, six warps 121, eight of one head 126; but one request of 8k takes 20.5, and 17.3 so).
const PAIRS_BY_BLOCK: Family = Family {
    variant: gathered_stored(2, CacheScales::Blocks),
    types: &[cached(DType::F16, DType::F4E2M1x2)],
    shapes: &[shape((64, 64), 8, 16, 6), shape((128, 128), 8, 16, 4)],
    shared_bytes: block_bytes::<2>,
    ..PAIRS_BY_TOKEN
};

/// Up to sixteen rows, and odd numbers of KV heads. More rows are as before: by the portable kernel, or over rows of q's type.
const ROWS_BY_BLOCK: Family = Family {
    variant: gathered_stored(1, CacheScales::Blocks),
    types: PAIRS_BY_BLOCK.types,
    shapes: &[shape((128, 128), 16, 32, 4)],
    shared_bytes: block_bytes::<1>,
    ..PAIRS_BY_BLOCK
};

/// The scales of a key and of a value.
const BYTES_OF_TOKEN: u32 = 8;

/// Elements that share a scale; in the kernel too.
const SCALE_BLOCK: u32 = 16;

/// So many KV heads of a block, neighbours where they are two.
const fn gathered(heads: u32) -> Variant {
    gathered_stored(heads, CacheScales::Heads)
}

const fn gathered_stored(heads: u32, scales: CacheScales) -> Variant {
    Variant::Sm90Decode {
        keys: KeySource::Gather,
        heads,
        scales,
        products: Products::OfWarps,
        tokens: Tokens::Cached,
        is_alone: false,
    }
}

/// The family with keys brought by TMA.
const fn by_tma(family: Family) -> Family {
    let Variant::Sm90Decode {
        heads,
        scales,
        products,
        tokens,
        is_alone,
        ..
    } = family.variant
    else {
        panic!("not a family of this kernel");
    };
    Family {
        variant: Variant::Sm90Decode {
            keys: KeySource::Tma,
            heads,
            scales,
            products,
            tokens,
            is_alone,
        },
        symbol: match products {
            Products::OfWarps => "folio_sm90_decode_tma",
            Products::OfWarpgroup => "folio_sm90_decode_warpgroup_tma",
        },
        ..family
    }
}

/// The family without a twin that has its keys in the other way.
const fn alone(family: Family) -> Family {
    Family {
        variant: family.variant.alone(),
        ..family
    }
}

/// The kernels of a family that make queries and keys of new tokens, of those `takes_new_tokens` says so of. They are in
/// the images of the others.
const fn with_new_tokens(family: Family, shapes: &'static [Shape]) -> Family {
    let family = by_tma(family);
    Family {
        variant: family.variant.with_new_tokens(),
        symbol: "folio_sm90_decode_tma_new_tokens",
        shapes,
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

fn shared_bytes<const HEADS: u32>(types: AttentionTypes, shape: Shape) -> u32 {
    stored_bytes::<HEADS, 1, 0>(types, shape)
}

/// Stages in what the rest leaves room for; in the kernel too.
fn warpgroup_bytes(types: AttentionTypes, shape: Shape) -> u32 {
    const CONSUMERS: u32 = 4;
    // Queries; two sets of weights; maxima and sums; where a row goes, the keys that it sees, its position, slope and power.
    let of_row = shape.head_dim_qk * 2 + 2 * shape.kv_tile * 2 + CONSUMERS * 8 + 36;
    let free = 113 * 1024 - 256 - shape.q_tile * of_row;
    let dims = shape.head_dim_qk + shape.head_dim_vo;
    let stage = shape.kv_tile * dims * types.kv.size() as u32;
    let stages = (96 * 1024).min(free) / stage;
    stages * stage + shape.q_tile * of_row + stages * 16
}

/// Rings of two stages and more for every warp, or for the warps that read the same keys, with so many bytes beside the
/// rows of a token and head; barriers, the warps' softmax sums, and queries, in so many numbers each, where registers do
/// not hold them. The kernel asserts that it comes to the same.
fn stored_bytes<const HEADS: u32, const QUERY_PARTS: u32, const BYTES_BESIDE: u32>(
    types: AttentionTypes,
    shape: Shape,
) -> u32 {
    bytes_of_rings(HEADS, QUERY_PARTS, BYTES_BESIDE, types, shape)
}

/// The same where each block of a row has a scale of a byte.
fn block_bytes<const HEADS: u32>(types: AttentionTypes, shape: Shape) -> u32 {
    let beside = (shape.head_dim_qk + shape.head_dim_vo) / SCALE_BLOCK;
    bytes_of_rings(HEADS, 1, beside, types, shape)
}

fn bytes_of_rings(
    heads: u32,
    query_parts: u32,
    bytes_beside: u32,
    types: AttentionTypes,
    shape: Shape,
) -> u32 {
    let warps = shape.threads / 32;
    let widest = shape.head_dim_qk.max(shape.head_dim_vo);
    let warp_rows = shape.q_tile.min(if widest <= 128 { 32 } else { 16 });
    let rings = warps * warp_rows / shape.q_tile;
    let sums = warps * heads * warp_rows * 8;
    let queries = match (shape.head_dim_qk, warp_rows) {
        (..=192, ..=16) => 0,
        (dim, _) => query_parts * heads * shape.q_tile * dim * 2,
    };
    // Two blocks are to have room on a multiprocessor.
    let free = 113 * 1024 - 128 - sums - queries;
    let elements = heads * shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo);
    let rows = elements / u32::from(types.kv.lanes()) * types.kv.size() as u32;
    let beside = heads * shape.kv_tile * bytes_beside;
    let stages = (96 * 1024 / (rings * rows)).min(free / (rings * (rows + beside)));
    let barriers = (rings * stages * 8).next_multiple_of(16);
    rings * stages * (rows + beside) + barriers + sums + queries
}

#[cfg(test)]
mod tests {
    use super::super::row::{AttentionRow, takes_new_tokens};
    use super::*;

    /// An image has the kernels that rows name, and no others.
    #[test]
    fn rows_without_a_twin_are_alone() {
        let rows: Vec<_> = FAMILIES.iter().flat_map(Family::rows).collect();
        let parts = |row: &AttentionRow| {
            let Variant::Sm90Decode {
                keys,
                heads,
                scales,
                products,
                is_alone,
                ..
            } = row.variant
            else {
                panic!("{}: a row of another kernel", row.row.name);
            };
            let image = (heads, scales, products, row.types, row.shape);
            (image, keys, is_alone)
        };
        for row in &rows {
            let (image, keys, is_alone) = parts(row);
            let has_twin = (rows.iter().map(parts))
                .any(|(other_image, other_keys, _)| other_image == image && other_keys != keys);
            assert_ne!(has_twin, is_alone, "{}", row.row.name);
        }
    }

    /// Where a source has the kernel for new tokens, there is a row for it, and nowhere else.
    #[test]
    fn kernels_for_new_tokens_are_rows() {
        let rows: Vec<_> = FAMILIES.iter().flat_map(Family::rows).collect();
        let (mut cached, mut new) = (0, 0);
        for row in &rows {
            let Variant::Sm90Decode {
                keys,
                scales,
                products,
                tokens,
                ..
            } = row.variant
            else {
                panic!("{}: a row of another kernel", row.row.name);
            };
            let takes = takes_new_tokens(scales, products, row.types, row.shape);
            let has = rows.iter().any(|other| {
                (other.variant, other.types, other.shape)
                    == (row.variant.with_new_tokens(), row.types, row.shape)
            });
            assert_eq!(has, takes && keys == KeySource::Tma, "{}", row.row.name);
            match tokens {
                Tokens::Cached => cached += usize::from(has),
                Tokens::New => new += 1,
            }
        }
        assert_eq!(cached, new);
    }
}
