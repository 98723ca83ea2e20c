//! Prefill over caches in other forms than rows of plain elements, whose keys become rows of q's type in the workspace first:
//! problems of so many queries that it pays. Where positions say the mask, results must be right over rounded rows.

use crate::common::door::Session;
use crate::common::instance::{Output, Planned, solve};
use crate::common::memory::HostMemory;
use crate::common::problem::{
    Alibi, Gaps, HeadScales, Layer, MaskKind, MemoryShape, Pattern, Problem, Request, Storage,
};
use crate::gpu::DeviceMemory;
use crate::prefill_widened::LENS;
use crate::problems::{
    assert_alone_is_the_same, assert_right, compare_with_rounded_rows, paged, run_again, session,
    solve_with, with_a_page,
};
use folio::dtype::DType;
use folio::problem::{CacheForm, Kind, KvLayout, LogBase};

/// A form and its elements, those of q where there are none.
const FORMS: [(CacheForm, Option<DType>); 8] = [
    (CacheForm::TokenHeadScales, Some(DType::I8)),
    (CacheForm::TokenHeadScales, Some(DType::F8E4M3)),
    (CacheForm::ChannelScales, Some(DType::I8)),
    (CacheForm::ChannelZeroPoints, Some(DType::I4x2)),
    (CacheForm::Nvfp4, Some(DType::F4E2M1x2)),
    (CacheForm::PackedKeys, None),
    (CacheForm::PackedKeys, Some(DType::F8E4M3)),
    (CacheForm::PackedKeys, Some(DType::F8E5M2)),
];

const TYPES: [DType; 2] = [DType::BF16, DType::F16];

/// A warp reads rows of 16, 8, 32, 6, 24, 10 and 20 eights.
const DIMS: [(u32, u32); 7] = [
    (128, 128),
    (64, 64),
    (256, 256),
    (48, 64),
    (192, 128),
    (80, 80),
    (160, 112),
];

fn storages() -> [Storage; 5] {
    [
        paged(16, KvLayout::Nhd),
        paged(1, KvLayout::Nhd),
        paged(5, KvLayout::Hnd),
        paged(48, KvLayout::Hnd),
        paged(64, KvLayout::Nhd),
    ]
}

fn problem(lens: &[(u32, u32)], q_dtype: DType, form: (CacheForm, Option<DType>)) -> Problem {
    Problem::plain(lens)
        .of(q_dtype)
        .stored(form.0, form.1.unwrap_or(q_dtype))
}

/// Rows next to each other, apart, and of bytes that no load of eight elements reads.
fn memory(n: usize) -> MemoryShape {
    let gaps = match n % 3 {
        0 => Gaps::default(),
        1 => Gaps {
            inner: 16,
            middle: 32,
            outer: 16,
            lead: 0,
        },
        _ => Gaps {
            inner: 1,
            middle: 3,
            outer: 5,
            lead: 1,
        },
    };
    MemoryShape {
        k: gaps,
        v: gaps,
        ..MemoryShape::default()
    }
}

fn assert_right_over_rows(problem: &Problem, got: &Output) {
    if let Err(difference) = compare_with_rounded_rows(problem, got) {
        panic!("{difference}\n{problem:?}");
    }
}

fn check(session: &dyn Session, problem: &Problem) {
    let got = solve(session, &DeviceMemory, problem);
    let got = got.unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
    assert_right_over_rows(problem, &got);
}

/// Every form, width, and place of rows.
pub fn widths() {
    let session = session();
    let mut n = 0;
    for form in FORMS {
        for q_dtype in TYPES {
            for storage in storages() {
                let (dim_qk, dim_vo) = DIMS[n % DIMS.len()];
                check(
                    &*session,
                    &Problem {
                        storage,
                        memory: memory(n / 2),
                        head_dim_vo: dim_vo,
                        ..problem(&LENS, q_dtype, form).heads(32, 2, dim_qk)
                    },
                );
                n += 1;
            }
        }
    }
}

/// What a layer may add. Windows over many keys, and masks that positions do not say, are other kernels'.
pub fn layers() {
    let session = session();
    let plain = || Layer {
        k_scale: 0.5,
        v_scale: 3.0,
        sinks: true,
        lse: Some(LogBase::Two),
        ..Layer::plain()
    };
    let layers = [
        (
            true,
            Layer {
                mask: MaskKind::Full,
                ..plain()
            },
        ),
        (
            true,
            Layer {
                logits_soft_cap: 5.0,
                ..plain()
            },
        ),
        (
            true,
            Layer {
                q_scales: HeadScales::PerRequest,
                ..plain()
            },
        ),
        (
            true,
            Layer {
                window: Some((90, 0)),
                ..plain()
            },
        ),
        (
            true,
            Layer {
                chunks: Some((64, 1)),
                ..plain()
            },
        ),
        (
            false,
            Layer {
                mask: MaskKind::Bits(Pattern::Random(0.5)),
                ..plain()
            },
        ),
        (
            false,
            Layer {
                alibi: Some(Alibi::Linear),
                ..plain()
            },
        ),
    ];
    let lens = [(150, 150), (200, 90), (90, 300)];
    for (f, form) in FORMS.into_iter().enumerate() {
        for (n, (over_rows, layer)) in layers.iter().enumerate() {
            let q_dtype = TYPES[(f + n) % 2];
            let mut problem = Problem {
                storage: paged(16, KvLayout::Hnd),
                layer: layer.clone(),
                ..problem(&lens, q_dtype, form).heads(16, 2, 128)
            };
            if form.0 == CacheForm::PackedKeys && problem.kv_dtype.is_fp8() {
                problem.layer.k_scales = HeadScales::PerHead;
                problem.layer.v_scales = HeadScales::One;
            }
            let got = solve(&*session, &DeviceMemory, &problem).unwrap();
            match over_rows {
                true => assert_right_over_rows(&problem, &got),
                false => assert_right(&problem, &got),
            }
        }
    }
}

/// Masks that positions do not say, at widths whose tiles under them have other rows: in some no item has room.
pub fn masks_of_widths() {
    let session = session();
    let layers = [
        Layer {
            alibi: Some(Alibi::Linear),
            ..Layer::plain()
        },
        Layer {
            mask: MaskKind::Bits(Pattern::Random(0.5)),
            ..Layer::plain()
        },
    ];
    for (n, dim) in [64, 80, 112, 128, 136, 152, 160, 168, 192, 256]
        .into_iter()
        .enumerate()
    {
        for (kind, lens) in [
            (Kind::Prefill, [(150, 150), (200, 90), (90, 300)]),
            (Kind::Decode, [(49, 150), (33, 0), (7, 300)]),
        ] {
            let problem = Problem {
                kind,
                storage: paged(16, KvLayout::Nhd),
                layer: layers[n % 2].clone(),
                batch_invariant: n % 3 == 0,
                ..problem(&lens, TYPES[n / 2 % 2], FORMS[2 + n % 4]).heads(8, 2, dim)
            };
            let got = solve(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}

/// Few tiles over many keys: rows are split, and their parts multiplied by the factors of V when they are put together.
pub fn splits() {
    let session = session();
    for form in FORMS {
        for q_dtype in TYPES {
            let problem = Problem {
                storage: paged(16, KvLayout::Nhd),
                layer: Layer {
                    sinks: true,
                    v_scale: 2.0,
                    ..Layer::plain()
                },
                ..problem(&[(40, 6000), (30, 100)], q_dtype, form).heads(8, 1, 128)
            };
            check(&*session, &problem);
        }
    }
}

/// Numbers beyond the range of fp16, and below it; split rows among them.
pub fn numbers_of_any_size() {
    let session = session();
    for form in &FORMS[..4] {
        for q_dtype in TYPES {
            for exponent in [20, -30] {
                let factor = 2f32.powi(-exponent);
                for lens in [&LENS[..], &[(40, 5000), (30, 100)]] {
                    let problem = Problem {
                        cache_exponent: exponent,
                        layer: Layer {
                            q_scales: HeadScales::PerRequest,
                            k_scale: factor,
                            v_scale: factor,
                            ..Layer::plain()
                        },
                        ..problem(lens, q_dtype, *form).heads(16, 2, 128)
                    };
                    check(&*session, &problem);
                }
            }
        }
    }
}

/// Lengths on the device, for a graph and not. The same handle then takes a batch that does not pay, and the first again.
pub fn batches() {
    let session = session();
    let flags = [(false, false), (true, false), (false, true), (true, true)];
    for (n, form) in FORMS.into_iter().enumerate() {
        let (graph, batch_invariant) = flags[n % 4];
        let problem = with_a_page(&Problem {
            graph,
            batch_invariant,
            ..problem(&LENS, TYPES[n / 4 % 2], form).heads(32, 2, 128)
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
}

/// A request has the same bits alone and among others.
pub fn batch_invariant() {
    let session = session();
    let lens = [(200, 900), (64, 64), (130, 2100), (0, 7), (300, 310)];
    for (n, form) in FORMS.into_iter().enumerate() {
        for q_dtype in TYPES {
            let problem = Problem {
                graph: n % 2 == 1,
                batch_invariant: true,
                storage: paged(16, KvLayout::Nhd),
                ..problem(&lens, q_dtype, form).heads(8, 2, 128)
            };
            let whole = solve(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &whole);
            assert_alone_is_the_same(&*session, &problem, &whole);
        }
    }
}
