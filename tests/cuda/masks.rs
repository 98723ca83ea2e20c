//! Masks in memory, by request and by ranges, and biases by distance, on every attention kernel that there is for
//! them: more keys than a step has, in every form. Against dense attention.

use crate::common::instance::solve;
use crate::common::memory::{HostMemory, Memory};
use crate::common::problem::{Alibi, Layer, MaskKind, Pattern, Problem, Storage, TableForm};
use crate::common::random;
use crate::common::strategy::layers;
use crate::gpu::{self, DeviceMemory};
use crate::problems::{assert_right, check, session, solve_with, with_lens};
use crate::steps::{Captured, Slot};
use folio::dtype::DType;
use folio::problem::{Kind, KvLayout, LogBase, MaskColumns};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// `(query heads, KV heads, elements of keys, elements of values)`, the longest prompt, and the lengths: one for every
/// tile of the kernels of many rows.
type Shape = ((u32, u32), (u32, u32), &'static [(u32, u32)]);

const MANY_ROWS: [Shape; 10] = [
    (
        (4, 1),
        (64, 64),
        &[(130, 300), (1, 70), (70, 70), (0, 40), (9, 3)],
    ),
    (
        (8, 2),
        (128, 128),
        &[(100, 430), (3, 129), (64, 64), (17, 5)],
    ),
    ((3, 3), (128, 128), &[(200, 513), (31, 32), (65, 40)]),
    ((6, 3), (192, 128), &[(70, 300), (1, 700), (33, 33)]),
    ((4, 2), (256, 256), &[(90, 200), (1, 333), (5, 2)]),
    ((5, 1), (128, 128), &[(40, 1000), (40, 40)]),
    ((4, 2), (96, 96), &[(90, 300), (1, 333), (33, 5)]),
    ((8, 2), (160, 160), &[(60, 300), (1, 70), (33, 33)]),
    // Blocks of heads that begin in the one before.
    ((34, 2), (128, 128), &[(90, 300), (1, 200), (33, 33)]),
    ((17, 1), (64, 64), &[(40, 700), (1, 70), (5, 3)]),
];

/// Few rows, over more keys than all warps of a block take at once.
const FEW_ROWS: [Shape; 6] = [
    (
        (4, 1),
        (64, 64),
        &[(4, 300), (1, 70), (2, 1), (0, 40), (3, 2000)],
    ),
    ((8, 2), (128, 128), &[(2, 430), (1, 129), (2, 2), (2, 5)]),
    ((16, 2), (128, 128), &[(2, 900), (1, 32), (2, 40)]),
    ((2, 2), (192, 128), &[(8, 300), (1, 700), (3, 3)]),
    ((4, 2), (256, 256), &[(4, 200), (1, 333), (2, 1)]),
    ((1, 1), (128, 128), &[(16, 1000), (16, 16)]),
];

fn problem((heads, dims, lens): Shape, layer: Layer) -> Problem {
    Problem {
        head_dim_vo: dims.1,
        layer,
        ..Problem::plain(lens)
            .of(DType::BF16)
            .heads(heads.0, heads.1, dims.0)
    }
}

/// A layer that asks for more than positions say.
fn masked(mut layer: Layer, wanted: u8) -> Layer {
    let plain = !layer.mask.is_custom()
        && layer.mask != MaskKind::CausalByRequest
        && layer.mm_prefix_ranges == 0
        && layer.alibi.is_none();
    if plain {
        match wanted % 5 {
            0 => layer.mask = MaskKind::Bits(Pattern::Random(0.5)),
            1 => layer.mask = MaskKind::Bytes(Pattern::Random(0.1)),
            2 => layer.mask = MaskKind::CausalByRequest,
            3 => layer.mm_prefix_ranges = 3,
            _ => layer.alibi = Some(Alibi::Linear),
        }
    }
    layer.o_scale = 0.0;
    layer
}

fn random_masks(cases: u32, shapes: &'static [Shape]) {
    let session = session();
    let page_sizes = prop::sample::select(vec![16u32, 8, 64, 1]);
    let paged = (page_sizes, any::<bool>(), 0u32..4).prop_map(|(page_size, is_hnd, spare)| {
        Storage::Paged {
            page_size,
            layout: match is_hnd {
                true => KvLayout::Hnd,
                false => KvLayout::Nhd,
            },
            form: TableForm::BlockTable {
                spare_columns: spare,
            },
            unused_pages: spare,
            shared_pages: 0,
        }
    });
    let storages = prop_oneof![3 => paged, 1 => Just(Storage::Ragged)];
    let fp8 = prop::sample::select(vec![None, None, Some(DType::F8E4M3), Some(DType::F8E5M2)]);
    let problems = (
        prop::sample::select(shapes),
        (layers(), any::<u8>()),
        storages,
        (any::<bool>(), fp8),
        any::<u64>(),
    )
        .prop_map(|(shape, (layer, wanted), storage, (is_half, fp8), seed)| {
            let q_dtype = match is_half {
                true => DType::F16,
                false => DType::BF16,
            };
            let problem = problem(shape, masked(layer, wanted)).of(q_dtype);
            Problem {
                storage,
                seed,
                kv_dtype: fp8.unwrap_or(q_dtype),
                ..problem
            }
        });
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(cases)
    });
    let result = runner.run(&problems, |problem| {
        check(&problem, solve(&*session, &DeviceMemory, &problem)).map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

pub fn masks_of_many_rows() {
    random_masks(200, &MANY_ROWS);
}

pub fn masks_of_few_rows() {
    random_masks(300, &FEW_ROWS);
}

/// Every pattern in both forms, with every count of columns, and what else decides about a key.
pub fn custom_masks() {
    let session = session();
    let patterns = [
        Pattern::Random(0.5),
        Pattern::Random(0.005),
        Pattern::Causal,
        Pattern::Range(100, 140),
        Pattern::Tree,
    ];
    let columns = [
        MaskColumns::Keys,
        MaskColumns::KeysAfterPrefix,
        MaskColumns::NewKeys,
    ];
    let mut number = 0;
    for pattern in patterns {
        for mask_columns in columns {
            for mask in [MaskKind::Bytes(pattern), MaskKind::Bits(pattern)] {
                let layer = Layer {
                    mask,
                    mask_columns,
                    masks_apart: mask_columns == MaskColumns::NewKeys || number % 2 == 0,
                    window: [None, Some((90, 20))][number % 3 / 2],
                    mm_prefix_ranges: [0, 0, 0, 2][number % 4],
                    mm_prefix_in_window: number % 8 == 7,
                    alibi: [None, None, None, None, Some(Alibi::Sqrt)][number % 5],
                    sinks: number % 7 == 0,
                    lse: Some(LogBase::Two),
                    ..Layer::plain()
                };
                for shapes in [&MANY_ROWS[..], &FEW_ROWS] {
                    let problem = problem(shapes[number % shapes.len()], layer.clone());
                    let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                    assert_right(&problem, &got);
                }
                number += 1;
            }
        }
    }
}

/// Rows that see nothing, in a block and in the whole request: outputs are 0, and log-sum-exps -inf.
pub fn rows_that_see_nothing() {
    let session = session();
    for (kind, lens) in [
        (Kind::Prefill, [(200, 400), (70, 10)]),
        (Kind::Decode, [(2, 400), (4, 3)]),
    ] {
        for mask in [
            MaskKind::Bits(Pattern::Random(0.0)),
            MaskKind::Bytes(Pattern::Random(0.0)),
            MaskKind::Bits(Pattern::Range(250, 251)),
            MaskKind::Bytes(Pattern::Range(250, 251)),
        ] {
            for dim in [64, 128, 256] {
                let problem = Problem {
                    kind,
                    layer: Layer {
                        mask,
                        ..Layer::plain()
                    },
                    ..Problem::plain(&lens).of(DType::BF16).heads(4, 1, dim)
                };
                let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                assert_right(&problem, &got);
            }
        }
    }
}

/// Requests whose keys are split among blocks, at places that need not be where a step begins.
pub fn masks_of_split_requests() {
    let session = session();
    for (lens, mask, ranges) in [
        (&[(16, 5000)][..], MaskKind::Bits(Pattern::Tree), 0),
        (
            &[(64, 3000), (20, 70)],
            MaskKind::Bytes(Pattern::Random(0.3)),
            0,
        ),
        (&[(64, 3000)], MaskKind::Causal, 3),
        (&[(1, 6000)], MaskKind::Bits(Pattern::Random(0.5)), 0),
        (&[(4, 6000)], MaskKind::Bits(Pattern::Tree), 2),
    ] {
        for dim in [64, 128] {
            for window in [None, Some((1500, 0))] {
                let problem = Problem {
                    layer: Layer {
                        mask,
                        window,
                        mm_prefix_ranges: ranges,
                        ..Layer::plain()
                    },
                    ..Problem::plain(lens).of(DType::BF16).heads(4, 1, dim)
                };
                let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                assert_right(&problem, &got);
            }
        }
    }
}

/// Items with all that goes with them, on the kernels that take masks and on those that do not, with lengths on either side.
pub fn items() {
    let session = session();
    let plain = Layer {
        mask: MaskKind::Items,
        ..Layer::plain()
    };
    let layers = [
        plain.clone(),
        Layer {
            window: Some((70, -1)),
            sinks: true,
            ..plain.clone()
        },
        Layer {
            mm_prefix_ranges: 2,
            logits_soft_cap: 20.0,
            ..plain.clone()
        },
        Layer {
            alibi: Some(Alibi::Linear),
            ..plain
        },
    ];
    for (kind, lens) in [
        (
            Kind::Decode,
            &[(1, 900), (3, 3), (0, 40), (2, 0), (1, 77)][..],
        ),
        (
            Kind::Prefill,
            &[(200, 900), (70, 70), (3, 0), (5, 2), (130, 257)],
        ),
    ] {
        for (dtype, dim, page_size) in [(DType::BF16, 128, 16), (DType::F16, 96, 5)] {
            for layer in &layers {
                let problem = Problem {
                    kind,
                    storage: Storage::paged(page_size),
                    layer: layer.clone(),
                    ..Problem::plain(lens).of(dtype).heads(8, 2, dim)
                };
                for memory in [&HostMemory as &dyn Memory, &DeviceMemory] {
                    let got = solve_with(&*session, memory, &problem).unwrap();
                    assert_right(&problem, &got);
                }
            }
        }
    }
}

/// A captured run makes its mask each time it is launched.
pub fn items_under_a_graph() {
    let session = session();
    let stream = gpu::new_stream();
    let problem = Problem {
        graph: true,
        layer: Layer {
            mask: MaskKind::Items,
            ..Layer::plain()
        },
        ..Problem::plain(&[]).of(DType::BF16).heads(8, 2, 128)
    };
    let largest = with_lens(&problem, &[(40, 400), (17, 390)]);
    let mut slot = Slot::new(session.attention(largest.desc()).unwrap());
    let captured = Captured::of_largest(&mut slot, largest.clone(), stream);
    for tag in [0, 3, 4] {
        let other = largest.with_layer(Layer {
            tag,
            ..largest.layer.clone()
        });
        assert_right(&other, &captured.launch(&other));
    }
    slot.scratch.assert_within_bounds();
}
