//! Prefill whose keys become rows in the workspace first: problems of so many queries that it pays. Keys in fp8 are widened,
//! with queries in 16 bits or in fp8, and those of small pages are copied.

use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::door::Session;
use crate::common::instance::{Output, Planned, solve};
use crate::common::memory::HostMemory;
use crate::common::problem::{
    Alibi, Gaps, HeadScales, Layer, MaskKind, MemoryShape, Pattern, Problem, Request, Storage,
};
use crate::gpu::DeviceMemory;
use crate::problems::{paged, run_again, session, solve_with, with_a_page};
use folio::dtype::DType;
use folio::problem::{KvLayout, LogBase};

const DIMS: [(u32, u32); 7] = [
    (64, 64),
    (128, 128),
    (192, 128),
    (256, 256),
    (96, 96),
    (72, 72),
    (40, 48),
];

const TYPES: [(DType, DType); 4] = [
    (DType::BF16, DType::F8E4M3),
    (DType::F16, DType::F8E4M3),
    (DType::BF16, DType::F8E5M2),
    (DType::F16, DType::F8E5M2),
];

const FP8: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];

/// Of queries, keys and outputs, where queries are in fp8.
const FP8_TYPES: [(DType, DType, DType); 6] = [
    (FP8[0], FP8[0], DType::BF16),
    (FP8[1], FP8[0], DType::F16),
    (FP8[0], FP8[1], FP8[0]),
    (FP8[1], FP8[1], FP8[1]),
    (FP8[0], FP8[0], FP8[0]),
    (FP8[0], FP8[1], DType::F32),
];

/// Around the keys that a warp widens and the steps of a tile; requests without keys and without queries. With groups of
/// 16 heads, a request has more than four tiles on average.
pub const LENS: [(u32, u32); 8] = [
    (90, 200),
    (65, 65),
    (64, 0),
    (0, 50),
    (70, 33),
    (120, 128),
    (80, 96),
    (33, 1),
];

fn storages() -> [Storage; 5] {
    [
        paged(16, KvLayout::Nhd),
        paged(1, KvLayout::Nhd),
        paged(5, KvLayout::Hnd),
        paged(48, KvLayout::Hnd),
        Storage::Ragged,
    ]
}

/// A decode on so many keys that to widen those of the batch pays.
const LONG: (u32, u32) = (1, 9000);

/// Of 16 heads, so many products that to copy 16-bit keys pays, in 1.3 times as many as the least.
const COPIED: [(u32, u32); 4] = [(450, 470), (440, 90), (700, 700), (1, 20_000)];

fn problem(
    lens: &[(u32, u32)],
    (dim_qk, dim_vo): (u32, u32),
    (q_dtype, kv_dtype): (DType, DType),
) -> Problem {
    Problem {
        kv_dtype,
        head_dim_vo: dim_vo,
        ..Problem::plain(lens).of(q_dtype).heads(32, 2, dim_qk)
    }
}

/// Keys of 16 bits that so many rows read that they are copied.
fn copied((dim_qk, dim_vo): (u32, u32), dtype: DType) -> Problem {
    Problem {
        head_dim_vo: dim_vo,
        ..Problem::plain(&COPIED).of(dtype).heads(16, 1, dim_qk)
    }
}

fn long_lens() -> Vec<(u32, u32)> {
    [&LENS[..], &[LONG]].concat()
}

/// Every other one with keys and values 8 elements apart: of fp8, not at multiples of 16 bytes.
fn memory(n: usize) -> MemoryShape {
    match n % 2 {
        0 => MemoryShape::default(),
        _ => MemoryShape {
            k: Gaps {
                inner: 8,
                middle: 24,
                outer: 8,
                lead: 8,
            },
            ..MemoryShape::default()
        },
    }
}

fn check(session: &dyn Session, problem: &Problem) {
    let got = solve(session, &DeviceMemory, problem);
    let got = got.unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
    assert_right(problem, &got);
}

fn assert_right(problem: &Problem, got: &Output) {
    let tolerance = Tolerance::of_matrix_unit(problem).of_rounded_rows(problem);
    if let Err(difference) = compare(problem, &dense::attention(problem), got, tolerance) {
        panic!("{difference}\n{problem:?}");
    }
}

/// Widths, types, and where the cache has its rows: two of the places for each, in turn.
pub fn widths() {
    let session = session();
    let each = DIMS
        .iter()
        .flat_map(|&dims| TYPES.map(|types| (dims, types)));
    for (turn, (dims, types)) in each.enumerate() {
        for n in [turn % 5, (turn + 2) % 5] {
            let problem = Problem {
                storage: storages()[n],
                memory: memory(n),
                ..problem(&long_lens(), dims, types)
            };
            check(&*session, &problem);
        }
    }
}

/// What a layer may add, and what is not widened: windows, and masks that positions do not say.
pub fn layers() {
    let session = session();
    let long = [(120, 700), (100, 1500), (0, 40), (150, 150), LONG];
    let plain = Layer::plain;
    let layers = [
        Layer {
            mask: MaskKind::Full,
            k_scale: 0.5,
            v_scale: 3.0,
            sinks: true,
            ..plain()
        },
        Layer {
            window: Some((90, 0)),
            k_scales: HeadScales::PerHead,
            v_scales: HeadScales::PerHead,
            ..plain()
        },
        Layer {
            q_scales: HeadScales::PerHead,
            k_scales: HeadScales::PerRequest,
            v_scales: HeadScales::PerRequest,
            sinks: true,
            ..plain()
        },
        Layer {
            window: Some((0, 30)),
            mask: MaskKind::Full,
            logits_soft_cap: 5.0,
            v_scales: HeadScales::One,
            ..plain()
        },
        Layer {
            window: Some((300, 0)),
            mm_prefix_ranges: 2,
            ..plain()
        },
        Layer {
            mask: MaskKind::Bits(Pattern::Random(0.5)),
            ..plain()
        },
        Layer {
            mask: MaskKind::CausalByRequest,
            alibi: Some(Alibi::Linear),
            ..plain()
        },
        Layer {
            chunks: Some((64, 1)),
            ..plain()
        },
    ];
    for types in TYPES {
        for layer in &layers {
            for storage in [paged(16, KvLayout::Nhd), paged(3, KvLayout::Hnd)] {
                let problem = Problem {
                    storage,
                    layer: layer.clone(),
                    kv_dtype: types.1,
                    ..Problem::plain(&long).of(types.0).heads(16, 1, 128)
                };
                check(&*session, &problem);
            }
        }
    }
}

/// Queries in fp8 of every width. Those of other types, and where they lie, come with them in turn.
pub fn fp8_queries() {
    let session = session();
    let mut n = 0;
    for dims in DIMS {
        for (q_dtype, kv_dtype, o_dtype) in FP8_TYPES {
            let problem = Problem {
                o_dtype,
                storage: storages()[n % 5],
                memory: MemoryShape {
                    q: memory(n / 2).k,
                    o: memory(n / 3).k,
                    ..memory(n)
                },
                ..problem(&LENS, dims, (q_dtype, kv_dtype))
            };
            check(&*session, &problem);
            n += 1;
        }
    }
}

/// Queries in fp8 under what a layer may add: scales of every operand, windows and chunks over many keys and over few, and
/// what goes to other kernels.
pub fn fp8_queries_layers() {
    let session = session();
    let scaled = Layer {
        q_scale: 0.75,
        k_scale: 1.5,
        v_scale: 3.0,
        sinks: true,
        lse: Some(LogBase::Two),
        ..Layer::plain()
    };
    let layers = [
        scaled.clone(),
        Layer {
            mask: MaskKind::Full,
            q_scales: HeadScales::PerHead,
            k_scales: HeadScales::PerHead,
            v_scales: HeadScales::PerHead,
            logits_soft_cap: 5.0,
            ..scaled.clone()
        },
        Layer {
            q_scales: HeadScales::PerRequest,
            k_scales: HeadScales::PerRequest,
            v_scales: HeadScales::PerRequest,
            ..scaled.clone()
        },
        Layer {
            window: Some((90, 0)),
            ..scaled.clone()
        },
        Layer {
            chunks: Some((64, 1)),
            ..scaled.clone()
        },
        Layer {
            mask: MaskKind::Bits(Pattern::Random(0.5)),
            alibi: Some(Alibi::Linear),
            ..scaled
        },
    ];
    let lens: [&[(u32, u32)]; 2] = [
        &[(120, 700), (100, 1500), (0, 40), (150, 150)],
        &[(150, 150), (200, 90), (90, 300)],
    ];
    for (n, (q_dtype, kv_dtype, o_dtype)) in FP8_TYPES.into_iter().enumerate() {
        for layer in &layers {
            let of_fp8 = o_dtype.is_fp8();
            let problem = Problem {
                storage: paged(16, KvLayout::Hnd),
                o_dtype,
                kv_dtype,
                layer: Layer {
                    o_scale: if of_fp8 { 0.125 } else { 0.0 },
                    o_scales: of_fp8,
                    ..layer.clone()
                },
                ..Problem::plain(lens[n % 2]).of(q_dtype).heads(16, 2, 128)
            };
            check(&*session, &problem);
        }
    }
}

/// Few tiles over many keys: rows are split, and the parts put together.
pub fn fp8_queries_splits() {
    let session = session();
    for (q_dtype, kv_dtype, o_dtype) in FP8_TYPES {
        for v_scales in [HeadScales::Absent, HeadScales::PerRequest] {
            let problem = Problem {
                storage: paged(16, KvLayout::Nhd),
                o_dtype,
                kv_dtype,
                layer: Layer {
                    sinks: true,
                    v_scale: 2.0,
                    v_scales,
                    lse: Some(LogBase::E),
                    o_scale: if o_dtype.is_fp8() { 0.25 } else { 0.0 },
                    ..Layer::plain()
                },
                ..Problem::plain(&[(40, 6000), (30, 100)])
                    .of(q_dtype)
                    .heads(8, 1, 128)
            };
            check(&*session, &problem);
        }
    }
}

/// Pages of sizes that no box has, in 16 bits: keys are copied, where another kernel would load them one by one and
/// where it would be the portable one.
pub fn copies() {
    let session = session();
    for (n, dims) in DIMS.into_iter().enumerate() {
        for dtype in [DType::BF16, DType::F16] {
            for (page_size, layout) in [(1, KvLayout::Nhd), (3, KvLayout::Hnd), (12, KvLayout::Nhd)]
            {
                let problem = Problem {
                    storage: paged(page_size, layout),
                    memory: memory(n),
                    ..copied(dims, dtype)
                };
                check(&*session, &problem);
            }
        }
    }
}

/// The same, and keys in fp8, under masks that positions do not say. Of head_dims without a kernel over rows for them, what loads
/// keys with every tile takes them.
pub fn masks() {
    let session = session();
    let layers = [
        Layer {
            mask: MaskKind::Bits(Pattern::Random(0.5)),
            sinks: true,
            ..Layer::plain()
        },
        Layer {
            mask: MaskKind::Bytes(Pattern::Tree),
            lse: Some(LogBase::Two),
            ..Layer::plain()
        },
        Layer {
            mm_prefix_ranges: 2,
            logits_soft_cap: 5.0,
            ..Layer::plain()
        },
        Layer {
            mask: MaskKind::CausalByRequest,
            alibi: Some(Alibi::Linear),
            ..Layer::plain()
        },
    ];
    let halves = [DType::BF16, DType::F16].map(|dtype| (dtype, dtype));
    let mut turn = 0;
    for dims in DIMS.into_iter().chain([(160, 160)]) {
        for types in TYPES.into_iter().chain(halves) {
            let of_types = match types.1.is_fp8() {
                true => problem(&long_lens(), dims, types),
                false => copied(dims, types.0),
            };
            let problem = Problem {
                storage: paged([1, 3, 12][turn % 3], KvLayout::Nhd),
                layer: layers[turn % layers.len()].clone(),
                ..of_types
            };
            check(&*session, &problem);
            turn += 1;
        }
    }
}

/// Lengths on the device, for a graph and not, and more requests than a block has threads. The same handle then takes a
/// batch that does not pay, and the first again.
pub fn batches() {
    let session = session();
    let types = [TYPES[0], (FP8[0], FP8[0])];
    let flags = [(false, false), (true, false), (false, true), (true, true)];
    for (types, (graph, batch_invariant)) in types
        .into_iter()
        .flat_map(|types| flags.map(|flags| (types, flags)))
    {
        let problem = with_a_page(&Problem {
            graph,
            batch_invariant,
            ..problem(&long_lens(), (128, 128), types)
        });
        let got = solve_with(&*session, &DeviceMemory, &problem).unwrap();
        assert_right(&problem, &got);
        let few = Problem {
            requests: problem.requests[..1]
                .iter()
                .map(|request| Request {
                    qo_len: 3,
                    ..*request
                })
                .collect(),
            ..problem.clone()
        };
        let handle = session.attention(problem.desc()).unwrap();
        let mut planned = Planned::new(handle, &DeviceMemory, &HostMemory, &problem).unwrap();
        for problem in [&few, &problem] {
            let got = run_again(&mut planned, &HostMemory, problem);
            assert_right(problem, &got);
        }
    }
    let mut many: Vec<(u32, u32)> = (0..300).map(|b| (48 + b % 5, b * 7 % 90)).collect();
    many.push((1, 30_000));
    let problem = Problem {
        kv_dtype: DType::F8E4M3,
        ..Problem::plain(&many).of(DType::BF16).heads(16, 1, 64)
    };
    check(&*session, &problem);
}
