//! Rows of the portable kernels, sm_80 and up: complete for the contract, and what every problem falls
//! back to.

use super::row::{Arch, Family, Fit, Op, Shape, Types, same};
use crate::dtype::DType;

/// How many warps divide the rows of a tile; where it is one, the warps divide the keys.
const WARPS_DIVIDE_KEYS: &[&str] = &["FOLIO_WARPS_M=1"];
const WARPS_DIVIDE_ROWS: &[&str] = &["FOLIO_WARPS_M=4"];

/// All families, the preferred ones first.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        op: Op::Decode,
        defines: WARPS_DIVIDE_KEYS,
        types: HALF,
        shapes: &DECODE_HALF,
        shared_bytes: ring_per_warp,
        ..ATTENTION
    },
    Family {
        op: Op::Decode,
        defines: WARPS_DIVIDE_KEYS,
        types: HALF_FP8,
        shapes: &DECODE_FP8,
        shared_bytes: ring_per_warp,
        ..ATTENTION
    },
    Family {
        op: Op::Prefill,
        defines: WARPS_DIVIDE_ROWS,
        types: HALF,
        shapes: &PREFILL_HALF,
        shared_bytes: one_ring,
        ..ATTENTION
    },
    Family {
        op: Op::Prefill,
        defines: WARPS_DIVIDE_ROWS,
        types: HALF_FP8,
        shapes: &PREFILL_FP8,
        shared_bytes: one_ring,
        ..ATTENTION
    },
    Family {
        op: Op::Decode,
        ..ATTENTION_F32
    },
    Family {
        op: Op::Prefill,
        ..ATTENTION_F32
    },
    Family {
        op: Op::Combine,
        source: "plan/combine.cu",
        symbol: "folio_combine",
        shapes: &[any_dims(256)],
        ..SMALL
    },
    Family {
        op: Op::Plan,
        source: "plan/plan.cu",
        symbol: "folio_plan",
        shapes: &[any_dims(1024)],
        ..SMALL
    },
    Family {
        op: Op::Append,
        source: "ops/append.cu",
        symbol: "folio_append",
        types: APPEND,
        shapes: &[any_dims(128)],
        ..SMALL
    },
    MERGE,
    Family {
        op: Op::MergeState,
        symbol: "folio_merge_state",
        ..MERGE
    },
];

/// Attention by mma.sync.
const ATTENTION: Family = Family {
    op: Op::Prefill,
    arch: Arch::Sm80,
    source: "generic/attention.cu",
    symbol: "folio_attention",
    defines: &[],
    suffix: "",
    types: &[],
    any_output: true,
    shapes: &[],
    fit: Fit::UpTo,
    shared_bytes: one_ring,
    bundled: true,
};

/// Attention by fp32 arithmetic.
const ATTENTION_F32: Family = Family {
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
        shape((256, 256), 16, 32, 128),
    ],
    shared_bytes: one_tile_f32,
    ..ATTENTION
};

/// Both kernels are one compilation.
const MERGE: Family = Family {
    op: Op::MergeStates,
    source: "ops/merge.cu",
    symbol: "folio_merge_states",
    types: &[same(DType::BF16), same(DType::F16), same(DType::F32)],
    shapes: &[any_dims(128)],
    ..SMALL
};

/// Kernels whose types are known at run time, or that have no shape.
const SMALL: Family = Family {
    types: &[same(DType::F32)],
    any_output: false,
    shared_bytes: none,
    ..ATTENTION
};

const HALF: &[Types] = &[same(DType::BF16), same(DType::F16)];

const HALF_FP8: &[Types] = &[
    cached(DType::BF16, DType::F8E4M3),
    cached(DType::F16, DType::F8E4M3),
    cached(DType::BF16, DType::F8E5M2),
    cached(DType::F16, DType::F8E5M2),
];

const APPEND: &[Types] = &[
    same(DType::BF16),
    same(DType::F16),
    same(DType::F32),
    cached(DType::BF16, DType::F8E4M3),
    cached(DType::F16, DType::F8E4M3),
    cached(DType::F32, DType::F8E4M3),
    cached(DType::BF16, DType::F8E5M2),
    cached(DType::F16, DType::F8E5M2),
    cached(DType::F32, DType::F8E5M2),
];

/// A warp has its own 16 (fp8: 32) keys; fewer warps where dims are large, to stay within 99 KiB, which
/// is what sm_86 and sm_89 have.
const DECODE_HALF: [Shape; 4] = [
    shape((64, 64), 16, 16, 128),
    shape((128, 128), 16, 16, 128),
    shape((192, 128), 16, 16, 64),
    shape((256, 256), 16, 16, 64),
];
const DECODE_FP8: [Shape; 4] = [
    shape((64, 64), 16, 32, 128),
    shape((128, 128), 16, 32, 128),
    shape((192, 128), 16, 32, 64),
    shape((256, 256), 16, 32, 64),
];
/// Two 16-row tiles for each warp where that is faster: every key that is read from shared memory is then
/// used twice. Measured on an H200, 4 × 4k causal: 161 TFLOP/s against 143 at head_dim 128, 130 against 164
/// at 64, where the softmax weighs more; fp8 keys leave no registers for it.
const PREFILL_HALF: [Shape; 4] = [
    shape((64, 64), 64, 64, 128),
    shape((128, 128), 128, 32, 128),
    shape((192, 128), 64, 32, 128),
    shape((256, 256), 64, 32, 128),
];
const PREFILL_FP8: [Shape; 4] = [
    shape((64, 64), 64, 64, 128),
    shape((128, 128), 64, 64, 128),
    shape((192, 128), 64, 32, 128),
    shape((256, 256), 64, 32, 128),
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

const fn any_dims(threads: u32) -> Shape {
    shape((0, 0), 0, 0, threads)
}

const fn cached(q: DType, kv: DType) -> Types {
    Types { q, kv, o: q }
}

/// Queries, and two stages of keys and values that all warps share.
fn one_ring(types: Types, shape: Shape) -> u32 {
    queries(shape) + ring(types, shape)
}

/// Queries, and two stages for each warp.
fn ring_per_warp(types: Types, shape: Shape) -> u32 {
    queries(shape) + shape.threads / 32 * ring(types, shape)
}

fn queries(shape: Shape) -> u32 {
    shape.q_tile * shape.head_dim_qk * 2
}

fn ring(types: Types, shape: Shape) -> u32 {
    2 * shape.kv_tile * (shape.head_dim_qk + shape.head_dim_vo) * types.kv.size() as u32
}

/// Queries, keys in rows of four more, and values, all as fp32.
fn one_tile_f32(_: Types, shape: Shape) -> u32 {
    let keys = shape.kv_tile * (shape.head_dim_qk + 4 + shape.head_dim_vo);
    4 * (shape.q_tile * shape.head_dim_qk + keys)
}

fn none(_: Types, _: Shape) -> u32 {
    0
}
