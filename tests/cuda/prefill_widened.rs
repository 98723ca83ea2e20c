//! Prefill over fp8 caches whose keys are widened to rows in the workspace first: problems of so many queries that it pays.

use crate::common::door::Session;
use crate::common::instance::{LayerData, Planned, solve};
use crate::common::memory::HostMemory;
use crate::common::problem::{
    Alibi, Gaps, HeadScales, Layer, MaskKind, MemoryShape, Pattern, Problem, Request, Storage,
    TableForm,
};
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, session, solve_with, with_a_page};
use folio::dtype::DType;
use folio::problem::KvLayout;

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

/// Around the keys that a warp widens and the steps of a tile; requests without keys and without queries. With groups of
/// 16 heads, a request has more than four tiles on average.
const LENS: [(u32, u32); 8] = [
    (90, 200),
    (65, 65),
    (64, 0),
    (0, 50),
    (70, 33),
    (120, 128),
    (80, 96),
    (33, 1),
];

fn paged(page_size: u32, layout: KvLayout) -> Storage {
    Storage::Paged {
        page_size,
        layout,
        form: TableForm::BlockTable { spare_columns: 1 },
        unused_pages: 3,
        shared_pages: 0,
    }
}

fn storages() -> [Storage; 5] {
    [
        paged(16, KvLayout::Nhd),
        paged(1, KvLayout::Nhd),
        paged(5, KvLayout::Hnd),
        paged(48, KvLayout::Hnd),
        Storage::Ragged,
    ]
}

fn problem((dim_qk, dim_vo): (u32, u32), (q_dtype, kv_dtype): (DType, DType)) -> Problem {
    Problem {
        kv_dtype,
        head_dim_vo: dim_vo,
        ..Problem::plain(&LENS).of(q_dtype).heads(32, 2, dim_qk)
    }
}

fn check(session: &dyn Session, problem: &Problem) {
    let got = solve(session, &DeviceMemory, problem);
    let got = got.unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
    assert_right(problem, &got);
}

/// Widths, types, and where the cache has its rows.
pub fn widths() {
    let session = session();
    for dims in DIMS {
        for types in TYPES {
            for (n, storage) in storages().into_iter().enumerate() {
                let memory = match n % 2 {
                    0 => MemoryShape::default(),
                    // Keys and values 8 bytes apart are not at multiples of 16.
                    _ => MemoryShape {
                        k: Gaps {
                            inner: 8,
                            middle: 24,
                            outer: 8,
                            lead: 8,
                        },
                        ..MemoryShape::default()
                    },
                };
                let problem = Problem {
                    storage,
                    memory,
                    ..problem(dims, types)
                };
                check(&*session, &problem);
            }
        }
    }
}

/// What a layer may add, and what is not widened: windows, and masks that positions do not say.
pub fn layers() {
    let session = session();
    let long = [(120, 700), (100, 1500), (0, 40), (150, 150)];
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

/// Lengths on the device, for a graph and not, and more requests than a block has threads. The same handle then takes a
/// batch that does not pay, and the first again.
pub fn batches() {
    let session = session();
    for (graph, batch_invariant) in [(false, false), (true, false), (false, true), (true, true)] {
        let problem = with_a_page(&Problem {
            graph,
            batch_invariant,
            ..problem((128, 128), TYPES[0])
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
            planned.replan(&HostMemory, problem).unwrap();
            let got = planned
                .run(&LayerData::new(&DeviceMemory, problem))
                .unwrap();
            assert_right(problem, &got);
        }
    }
    let many: Vec<(u32, u32)> = (0..300).map(|b| (48 + b % 5, b * 7 % 90)).collect();
    let problem = Problem {
        kv_dtype: DType::F8E4M3,
        ..Problem::plain(&many).of(DType::BF16).heads(16, 1, 64)
    };
    check(&*session, &problem);
}
