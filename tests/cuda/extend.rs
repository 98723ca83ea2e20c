//! New keys and values beside the cache: random problems, the shapes of the kernels of many rows with all that a layer may
//! ask for, and captured graphs. Against dense attention, which sees one list of keys.

use crate::common::instance::{LayerData, Scratch, Step, solve};
use crate::common::memory::HostMemory;
use crate::common::problem::{
    Alibi, Bias, BiasHeads, HeadScales, Layer, MaskKind, Pattern, Problem, Storage, TableForm,
    ValueRows,
};
use crate::common::random;
use crate::common::strategy::{extends, layers};
use crate::gpu::{self, DeviceMemory};
use crate::problems::{assert_right, check, session, with_lens};
use crate::steps::{Captured, Slot};
use folio::api::Stream;
use folio::dtype::DType;
use folio::problem::{CacheForm, KvLayout};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// `(query heads, KV heads)`, elements of keys and of values, and lengths whose prefixes end within blocks and pages.
type Shape = ((u32, u32), (u32, u32), &'static [(u32, u32)]);

const SHAPES: [Shape; 7] = [
    (
        (4, 1),
        (64, 64),
        &[(130, 300), (1, 70), (70, 70), (0, 40), (9, 13)],
    ),
    (
        (8, 2),
        (128, 128),
        &[(100, 430), (3, 129), (64, 64), (17, 35)],
    ),
    ((3, 3), (128, 128), &[(200, 513), (31, 32), (65, 1040)]),
    ((6, 3), (192, 128), &[(70, 300), (1, 700), (33, 33)]),
    ((4, 2), (256, 256), &[(90, 200), (1, 333), (5, 6)]),
    ((4, 4), (96, 96), &[(300, 1000), (40, 40)]),
    // Blocks of heads that begin in the one before.
    ((34, 2), (128, 128), &[(50, 300), (1, 90), (9, 13)]),
];

fn problem((heads, dims, lens): Shape, layer: Layer) -> Problem {
    Problem {
        head_dim_vo: dims.1,
        layer,
        ..Problem::plain(lens)
            .of(DType::BF16)
            .heads(heads.0, heads.1, dims.0)
            .extend(DType::BF16)
    }
}

fn run(cases: u32, problems: impl Strategy<Value = Problem>) {
    let session = session();
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

pub fn extend_random() {
    // Over other forms of caches kernels take 16-bit queries.
    let taken = extends().prop_filter("queries of 16 bits over stored forms", |problem| {
        let is_half = matches!(problem.q_dtype, DType::F16 | DType::BF16);
        problem.form == CacheForm::Plain || is_half
    });
    run(300, taken);
}

/// Any layer over the shapes of the kernels of many rows.
pub fn extend_layers() {
    let page_sizes = prop::sample::select(vec![16u32, 8, 64, 1, 5]);
    let storages = (page_sizes, any::<bool>()).prop_map(|(page_size, is_hnd)| Storage::Paged {
        page_size,
        layout: match is_hnd {
            true => KvLayout::Hnd,
            false => KvLayout::Nhd,
        },
        form: TableForm::BlockTable { spare_columns: 1 },
        unused_pages: 2,
        shared_pages: 0,
    });
    let shapes = prop::sample::select(&SHAPES[..]);
    let problems = (shapes, layers(), storages, any::<(bool, bool, u64)>()).prop_map(
        |(shape, mut layer, storage, (is_half, is_fp8, seed))| {
            layer.o_scale = 0.0;
            let dtype = if is_half { DType::F16 } else { DType::BF16 };
            let problem = Problem {
                storage,
                seed,
                ..problem(shape, layer).of(dtype).extend(dtype)
            };
            Problem {
                kv_dtype: if is_fp8 { DType::F8E4M3 } else { dtype },
                ..problem
            }
        },
    );
    run(200, problems);
}

/// The cache's scales are not the new keys'; every type of cache, new keys and output.
pub fn extend_types() {
    let session = session();
    let (half, e4m3, e5m2) = (DType::BF16, DType::F8E4M3, DType::F8E5M2);
    for (q_dtype, kv_dtype, new_kv) in [
        (half, half, half),
        (half, e4m3, half),
        (DType::F16, e5m2, DType::F16),
        (half, half, e4m3),
        (e4m3, e4m3, e4m3),
        (DType::F32, e4m3, DType::F32),
    ] {
        for shape in &SHAPES[..2] {
            for o_dtype in [
                if q_dtype.is_fp8() { half } else { q_dtype },
                DType::F32,
                e4m3,
            ] {
                let layer = Layer {
                    k_scale: 0.5,
                    v_scale: 3.0,
                    k_scales: HeadScales::PerHead,
                    v_scales: HeadScales::PerHead,
                    o_scale: if o_dtype.is_fp8() { 0.02 } else { 0.0 },
                    sinks: true,
                    ..Layer::plain()
                };
                let problem = Problem {
                    q_dtype,
                    kv_dtype,
                    o_dtype,
                    ..problem(*shape, layer).extend(new_kv)
                };
                let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                assert_right(&problem, &got);
            }
        }
    }
}

/// Long prefixes, which are split, and long prompts; one wrong row of V shows.
pub fn extend_long() {
    let session = session();
    for lens in [
        &[(64, 5000), (20, 70)][..],
        &[(600, 2900), (1, 4000), (300, 300)],
        &[(1500, 1999)],
    ] {
        for layer in [
            Layer::plain(),
            Layer {
                window: Some((700, 0)),
                chunks: Some((1000, 1)),
                ..Layer::plain()
            },
            Layer {
                alibi: Some(Alibi::Linear),
                mask: MaskKind::Bits(Pattern::Tree),
                ..Layer::plain()
            },
        ] {
            let problem = Problem {
                values: ValueRows::OneHot,
                ..problem(((4, 1), (128, 128), lens), layer)
            };
            let got = solve(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}

/// Rows in packed order whose windows hold none of their cached keys, which end within blocks of eight. With a bias
/// the portable decode kernel has them.
pub fn extend_packed_unseen() {
    let session = session();
    let bias = Bias {
        dtype: DType::F32,
        heads: BiasHeads::One,
        request_rows: true,
        new_keys: true,
        transposed: false,
        spare: 0,
        reach: None,
    };
    let layer = Layer {
        window: Some((0, 0)),
        bias: Some(bias),
        ..Layer::plain()
    };
    for (heads, dim) in [(3, 32), (2, 72), (1, 128), (2, 256)] {
        for page_size in [8, 16, 24] {
            let lens = &[(2, 2), (1, 14), (4, 425), (1, 60), (3, 134)];
            let problem = Problem {
                storage: Storage::paged(page_size),
                form: CacheForm::PackedKeys,
                ..problem(((heads, heads), (dim, dim), lens), layer.clone())
            };
            let got = solve(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}

/// Many rows on few cached keys, whose scales say what all of a head's rows are divided by in fp16. Scales behind the cached
/// keys are no part of that.
pub fn extend_few_cached_scales() {
    let session = session();
    for dtype in [DType::I8, DType::F8E4M3] {
        for lens in [
            &[(30, 31)][..],
            &[(30, 30), (2, 3)],
            &[(33, 35), (70, 99), (0, 17), (40, 60)],
        ] {
            for page_size in [16, 1] {
                let problem = Problem {
                    storage: Storage::paged(page_size),
                    kv_dtype: dtype,
                    form: CacheForm::TokenHeadScales,
                    ..problem(((8, 1), (64, 64), lens), Layer::plain())
                        .of(DType::F16)
                        .extend(DType::F16)
                };
                let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                assert_right(&problem, &got);
            }
        }
    }
}

/// Lengths on the host, page ids on the device.
pub fn extend_device_page_ids() {
    let session = session();
    for shape in SHAPES {
        let problem = problem(shape, Layer::plain());
        let mut handle = session.attention(problem.desc()).unwrap();
        let info = handle.workspace().unwrap();
        let scratch = Scratch::new(&DeviceMemory, &info);
        let (host, device) = (
            Step::new(&HostMemory, &problem),
            Step::new(&DeviceMemory, &problem),
        );
        let mut input = host.input();
        input.kv_indices = device.input().kv_indices;
        let bytes = (info.device_bytes, info.host_bytes);
        let stream = Stream::default();
        handle
            .plan(&input, &scratch.workspace(), bytes, stream)
            .unwrap();
        let layer = LayerData::new(&DeviceMemory, &problem);
        handle.run(&layer.input(), stream).unwrap();
        assert_right(&problem, &layer.output());
        scratch.assert_within_bounds();
    }
}

/// Batches within 4 requests, 80 rows and 2000 keys, one of them without a cache and one without rows.
const BATCHES: [&[(u32, u32)]; 5] = [
    &[(20, 100), (1, 900), (13, 40)],
    &[(20, 2000), (2, 2), (1, 1), (17, 333)],
    &[(20, 20), (7, 7)],
    &[],
    &[(0, 50), (3, 64)],
];

/// A graph captured once serves every later plan, and leaves the rows beyond its batch alone.
pub fn extend_graph_replays() {
    let session = session();
    let stream = gpu::new_stream();
    for layer in [
        Layer::plain(),
        Layer {
            chunks: Some((64, 1)),
            sinks: true,
            lse_dtype: DType::F16,
            ..Layer::plain()
        },
    ] {
        let mut problem = problem(SHAPES[1], layer);
        problem.graph = true;
        problem.storage = Storage::Paged {
            page_size: 16,
            layout: KvLayout::Nhd,
            form: TableForm::BlockTable { spare_columns: 2 },
            unused_pages: 3,
            shared_pages: 0,
        };
        let largest = with_lens(&problem, &[(20, 2000); 4]);
        let mut desc = largest.desc();
        desc.max_num_pages = 0;
        let mut slot = Slot::new(session.attention(desc).unwrap());
        let captured = Captured::of_largest(&mut slot, largest, stream);
        for lens in BATCHES {
            let batch = with_lens(&problem, lens);
            assert_right(&batch, &captured.replay(&mut slot, &batch));
        }
        slot.scratch.assert_within_bounds();
    }
}
