//! Rows of the portable kernels, sm_80 and up: complete for the contract, and what every problem falls
//! back to.

use super::row::{
    AttentionTypes, F16_FP8, Family, Fit, HALF, HALF_FP8, HALF_STORED, MOST_HEAD_DIM,
    MOST_WIDE_HEAD_DIM, Phase, Shape, Variant, cached, same,
};
use crate::cuda::kernels::row::Arch;
use crate::dtype::DType;

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        types: HALF,
        shapes: &DECODE_HALF,
        ..DECODE
    },
    Family {
        types: F16_FP8,
        shapes: &DECODE_FP8,
        ..DECODE
    },
    Family {
        types: HALF,
        shapes: &DECODE_MORE_HALF,
        ..DECODE
    },
    Family {
        types: F16_FP8,
        shapes: &[DECODE_MORE_FP8[0]],
        ..DECODE
    },
    // All registers: the kernel for fp16 takes 2 % longer over queries in bf16.
    Family {
        types: HALF_FP8,
        shapes: &[DECODE_MORE_FP8[1]],
        ..DECODE
    },
    Family {
        types: HALF,
        shapes: &DECODE_WIDE_HALF,
        ..DECODE_WIDE
    },
    Family {
        types: F16_FP8,
        shapes: &DECODE_WIDE_FP8,
        ..DECODE_WIDE
    },
    Family {
        types: HALF,
        shapes: &PREFILL_HALF,
        ..PREFILL
    },
    Family {
        types: HALF_FP8,
        shapes: &PREFILL_FP8,
        shared_bytes: one_tile_and_wide,
        ..PREFILL
    },
    Family {
        types: HALF_STORED,
        source: "generic/decode_stored.cu",
        shapes: &DECODE_STORED,
        shared_bytes: stored_ring_per_warp,
        ..STORED
    },
    Family {
        types: HALF_STORED,
        shapes: &PREFILL_STORED,
        phase: Phase::Prefill,
        shared_bytes: one_stored_ring,
        ..STORED
    },
    Family {
        phase: Phase::Decode,
        ..ATTENTION_F32
    },
    Family {
        phase: Phase::Prefill,
        ..ATTENTION_F32
    },
    Family {
        phase: Phase::Decode,
        ..WIDE
    },
    Family {
        phase: Phase::Prefill,
        ..WIDE
    },
    Family {
        phase: Phase::Decode,
        ..WIDE_FP8
    },
    Family {
        phase: Phase::Prefill,
        ..WIDE_FP8
    },
    Family {
        phase: Phase::Decode,
        ..WIDE_F32
    },
    Family {
        phase: Phase::Prefill,
        ..WIDE_F32
    },
];

/// Attention by mma.sync, the warps dividing the keys.
const DECODE: Family = Family {
    phase: Phase::Decode,
    variant: Variant::Generic {
        warps_m: 1,
        warps_d: 1,
        stages: 2,
    },
    arch: Arch::Sm80,
    source: "generic/attention.cu",
    symbol: "folio_attention",
    types: &[],
    any_output: true,
    shapes: &[],
    fit: Fit::UpTo,
    shared_bytes: ring_per_warp,
    bundled: true,
};

/// The same with one stage: two are more than the 99 KiB that sm_86 and sm_89 have, and fewer warps are slower.
const DECODE_WIDE: Family = Family {
    variant: Variant::Generic {
        warps_m: 1,
        warps_d: 1,
        stages: 1,
    },
    shared_bytes: tile_per_warp,
    ..DECODE
};

/// The same, the four warps dividing the rows.
const PREFILL: Family = Family {
    phase: Phase::Prefill,
    variant: Variant::Generic {
        warps_m: 4,
        warps_d: 1,
        stages: 1,
    },
    shared_bytes: one_tile,
    ..DECODE
};

/// Attention over caches in other forms than plain rows.
const STORED: Family = Family {
    variant: Variant::GenericStored,
    source: "generic/attention_stored.cu",
    symbol: "folio_attention_stored",
    ..DECODE
};

/// Attention by fp32 arithmetic, compiled alike for both phases.
const ATTENTION_F32: Family = Family {
    variant: Variant::GenericF32,
    source: "generic/attention_f32.cu",
    symbol: "folio_attention_f32",
    types: &[
        same(DType::F32),
        cached(DType::F32, DType::F8E4M3),
        cached(DType::F32, DType::F8E5M2),
    ],
    shapes: &[
        shape((64, 64), 16, 32, 128),
        shape((128, 128), 16, 32, 128),
        shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 16, 32, 128),
    ],
    shared_bytes: one_tile_f32,
    ..DECODE
};

/// Rows above [`MOST_HEAD_DIM`], compiled alike for both phases. A warp's registers hold half of 16 rows of outputs. 32 rows
/// of queries and two stages are 96 KiB, of which a Hopper multiprocessor holds two.
const WIDE: Family = Family {
    variant: Variant::Generic {
        warps_m: 2,
        warps_d: 2,
        stages: 2,
    },
    types: HALF,
    shapes: &[shape(WIDEST, 32, 16, 128)],
    shared_bytes: one_ring,
    ..DECODE
};
const WIDE_FP8: Family = Family {
    types: HALF_FP8,
    shapes: &[shape(WIDEST, 32, 32, 128)],
    ..WIDE
};
const WIDE_F32: Family = Family {
    shapes: &[shape(WIDEST, 16, 32, 128)],
    shared_bytes: keys_or_values_f32,
    ..ATTENTION_F32
};
const WIDEST: (u32, u32) = (MOST_WIDE_HEAD_DIM, MOST_WIDE_HEAD_DIM);

/// A warp has its own 16 (fp8: 32) keys.
const DECODE_HALF: [Shape; 2] = [shape((64, 64), 16, 16, 128), shape((128, 128), 16, 16, 128)];
const DECODE_FP8: [Shape; 2] = [shape((64, 64), 16, 32, 128), shape((128, 128), 16, 32, 128)];
/// Two 16-row tiles, where a warp's registers hold the outputs.
const DECODE_MORE_HALF: [Shape; 2] = [shape((64, 64), 32, 16, 128), shape((128, 128), 32, 16, 128)];
const DECODE_MORE_FP8: [Shape; 2] = [shape((64, 64), 32, 32, 128), shape((128, 128), 32, 32, 128)];
const DECODE_WIDE_HALF: [Shape; 2] = [
    shape((192, 128), 16, 16, 128),
    shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 16, 16, 128),
];
const DECODE_WIDE_FP8: [Shape; 2] = [
    shape((192, 128), 16, 32, 128),
    shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 16, 32, 128),
];
/// Two 16-row tiles for each warp where its registers hold the outputs: every key that is read from shared memory is then
/// used twice. Keys as many as registers hold the logits of.
const PREFILL_HALF: [Shape; 5] = [
    shape((64, 64), 128, 64, 128),
    shape((96, 96), 128, 32, 128),
    shape((128, 128), 128, 32, 128),
    shape((192, 128), 128, 32, 128),
    shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 64, 32, 128),
];
const PREFILL_FP8: [Shape; 4] = [
    shape((64, 64), 128, 64, 128),
    shape((128, 128), 128, 32, 128),
    shape((192, 128), 128, 32, 128),
    shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 64, 32, 128),
];

/// Two sizes for all forms. A warp has its own keys.
const DECODE_STORED: [Shape; 2] = [
    shape((128, 128), 16, 32, 128),
    shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 16, 16, 128),
];
/// Queries take twice the room, and a tile is there twice, as it is stored and as it is multiplied.
const PREFILL_STORED: [Shape; 2] = [
    shape((128, 128), 64, 32, 128),
    shape((MOST_HEAD_DIM, MOST_HEAD_DIM), 64, 16, 128),
];

const fn shape(
    (head_dim_qk, head_dim_vo): (u32, u32),
    q_tile: u32,
    kv_tile: u32,
    threads: u32,
) -> Shape {
    Shape {
        head_dim_qk,
        head_dim_vo,
        q_tile,
        kv_tile,
        threads,
    }
}

/// Queries, and a tile of keys and values that all warps share.
fn one_tile(types: AttentionTypes, shape: Shape) -> u32 {
    queries(shape) + ring(types, shape) / 2
}

/// The same, and a tile of what keys or values are widened to.
fn one_tile_and_wide(types: AttentionTypes, shape: Shape) -> u32 {
    one_tile(types, shape) + shape.kv_tile * shape.head_dim_qk.max(shape.head_dim_vo) * 2
}

/// Queries, and two stages of keys and values that all warps share.
fn one_ring(types: AttentionTypes, shape: Shape) -> u32 {
    queries(shape) + ring(types, shape)
}

/// Queries, and a tile of keys and values for each warp.
fn tile_per_warp(types: AttentionTypes, shape: Shape) -> u32 {
    queries(shape) + shape.threads / 32 * ring(types, shape) / 2
}

/// Queries, and two stages for each warp.
fn ring_per_warp(types: AttentionTypes, shape: Shape) -> u32 {
    queries(shape) + shape.threads / 32 * ring(types, shape)
}

fn queries(shape: Shape) -> u32 {
    shape.q_tile * shape.head_dim_qk * 2
}

fn ring(types: AttentionTypes, shape: Shape) -> u32 {
    2 * shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo) * types.kv.size() as u32
}

/// Queries as sums of two 16-bit numbers with a number for each row, and keys and values that all warps share.
fn one_stored_ring(_: AttentionTypes, shape: Shape) -> u32 {
    stored_queries(shape) + stored_ring(shape)
}

/// The same queries, and for each warp two stages of bytes of keys and values, with a factor of each.
fn stored_ring_per_warp(_: AttentionTypes, shape: Shape) -> u32 {
    let stage = shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo + 8);
    stored_queries(shape) + shape.threads / 32 * 2 * stage
}

fn stored_queries(shape: Shape) -> u32 {
    2 * queries(shape) + (4 * shape.q_tile).next_multiple_of(128)
}

/// A tile of 16-bit numbers, two stages of bytes, and two factors of each key.
fn stored_ring(shape: Shape) -> u32 {
    shape.kv_tile * (4 * (shape.head_dim_qk + shape.head_dim_vo) + 8)
}

/// Queries, keys in rows of four more, and values, all as fp32.
fn one_tile_f32(types: AttentionTypes, shape: Shape) -> u32 {
    keys_or_values_f32(types, shape) + 4 * shape.kv_tile * shape.head_dim_vo
}

/// The same where values take the place of keys.
fn keys_or_values_f32(_: AttentionTypes, shape: Shape) -> u32 {
    4 * (shape.q_tile * shape.head_dim_qk + shape.kv_tile * (shape.head_dim_qk + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// sm_86 and sm_89 have 99 KiB for a block.
    #[test]
    fn every_row_has_room_on_every_device() {
        for row in FAMILIES.iter().flat_map(Family::rows) {
            assert!(row.row.shared_bytes <= 99 << 10, "{}", row.row.name);
        }
    }
}
