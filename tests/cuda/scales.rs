//! Scales in tensors: of queries, keys, values and outputs; of all heads, of each, and of each of every request.

use crate::common::instance::solve;
use crate::common::problem::{HeadScales, Layer, Problem, Storage};
use crate::gpu::{self, DeviceMemory};
use crate::problems::{assert_right, session};
use crate::steps::{Captured, Slot};
use folio::dtype::DType;
use folio::problem::{CacheForm, Kind};

const KINDS: [HeadScales; 3] = [HeadScales::One, HeadScales::PerHead, HeadScales::PerRequest];

/// Rows that are split, on the kernels of decode and of prefill.
fn problem(kind: Kind, layer: Layer) -> Problem {
    let lens = match kind {
        Kind::Decode => [(1, 3000), (2, 17), (1, 700)],
        _ => [(5, 3000), (5, 17), (70, 100)],
    };
    Problem {
        kind,
        o_dtype: DType::F8E4M3,
        storage: Storage::paged(16),
        layer: Layer {
            sinks: true,
            o_scale: 0.02,
            ..layer
        },
        ..Problem::plain(&lens).of(DType::BF16).heads(8, 2, 128)
    }
}

fn scaled(q_scales: HeadScales, k_scales: HeadScales, o_scales: bool) -> Layer {
    Layer {
        q_scales,
        k_scales,
        v_scales: k_scales,
        o_scales,
        ..Layer::plain()
    }
}

/// The same on the portable kernel of fp32.
fn in_fp32(problem: Problem) -> Problem {
    Problem {
        q_dtype: DType::F32,
        kv_dtype: DType::F32,
        ..problem
    }
}

/// Outputs in 16 bits, which Hopper's prefill kernels write: over keys of q's type, and over keys that they convert.
fn in_16_bits(problem: Problem, kv_dtype: DType) -> Problem {
    Problem {
        kv_dtype,
        o_dtype: DType::BF16,
        layer: Layer {
            o_scale: 0.0,
            ..problem.layer
        },
        ..problem
    }
}

/// The same over a cache whose tokens have scales, in the place of those of heads.
fn by_token(plain: Problem) -> Problem {
    let layer = Layer {
        k_scales: HeadScales::Absent,
        v_scales: HeadScales::Absent,
        ..plain.layer.clone()
    };
    plain
        .with_layer(layer)
        .stored(CacheForm::TokenHeadScales, DType::I8)
}

pub fn scales_in_tensors() {
    let session = session();
    for kind in [Kind::Decode, Kind::Prefill] {
        for scales in KINDS {
            for layer in [
                scaled(scales, HeadScales::Absent, false),
                scaled(scales, HeadScales::PerHead, true),
                scaled(HeadScales::PerHead, scales, false),
                scaled(HeadScales::Absent, scales, false),
                scaled(HeadScales::Absent, scales, true),
            ] {
                let plain = problem(kind, layer);
                for problem in [
                    in_fp32(plain.clone()),
                    in_16_bits(plain.clone(), DType::BF16),
                    in_16_bits(plain.clone(), DType::F8E4M3),
                    by_token(plain.clone()),
                    plain,
                ] {
                    let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                    assert_right(&problem, &got);
                }
            }
        }
    }
}

/// A graph reads the scales that are there when it is launched.
pub fn scales_change_under_a_graph() {
    let session = session();
    let stream = gpu::new_stream();
    for kind in [Kind::Decode, Kind::Prefill] {
        let problems = KINDS.into_iter().flat_map(|scales| {
            let first = Problem {
                graph: true,
                ..problem(kind, scaled(scales, scales, true))
            };
            [in_16_bits(first.clone(), DType::F8E4M3), first]
        });
        for first in problems {
            let mut slot = Slot::new(session.attention(first.desc()).unwrap());
            let captured = Captured::of_largest(&mut slot, first.clone(), stream);
            for tag in [0, 5, 6] {
                let other = first.with_layer(Layer {
                    tag,
                    ..first.layer.clone()
                });
                assert_right(&other, &captured.launch(&other));
            }
            slot.scratch.assert_within_bounds();
        }
    }
}
