//! Prefill at every head dim, which Hopper's kernel takes by rows of ten widths: keys and values of equal and of other
//! widths, over pages and ragged rows, with gaps behind every row. Gaps hold NaN, and what is written to them shows. And
//! rows above 256, which are the portable kernels'.

use crate::common::instance::solve;
use crate::common::problem::{
    Gaps, HeadScales, Layer, MaskKind, MemoryShape, Problem, Storage, TableForm,
};
use crate::common::random;
use crate::common::strategy::{problems, within_budget};
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, check, session};
use folio::dtype::DType;
use folio::problem::{Kind, KvLayout};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const WIDTHS: u32 = 32;

fn width(n: u32) -> u32 {
    8 + n % WIDTHS * 8
}

fn paged(page_size: u32, layout: KvLayout) -> Storage {
    Storage::Paged {
        page_size,
        layout,
        form: TableForm::BlockTable { spare_columns: 1 },
        unused_pages: 2,
        shared_pages: 0,
    }
}

/// Rows of 16-byte units apart by `units` more than they are long; pages of K and V as far apart as if they were
/// interleaved, where `outer` says so.
fn gapped(problem: &Problem, units: u32, interleaved: bool) -> MemoryShape {
    let inner = 8 * units;
    let page = |width: u32| match problem.storage {
        Storage::Paged { page_size, .. } if interleaved => {
            page_size * problem.num_kv_heads * (width + inner)
        }
        _ => 0,
    };
    let gaps = |outer| Gaps {
        inner,
        outer,
        ..Gaps::default()
    };
    MemoryShape {
        q: gaps(0),
        k: gaps(page(problem.head_dim_qk)),
        v: gaps(page(problem.head_dim_vo)),
        o: gaps(0),
        ..MemoryShape::default()
    }
}

fn layers() -> [Layer; 4] {
    [
        Layer::plain(),
        Layer {
            mask: MaskKind::Full,
            logits_soft_cap: 20.0,
            ..Layer::plain()
        },
        Layer {
            window: Some((90, 0)),
            sinks: true,
            ..Layer::plain()
        },
        Layer {
            mask: MaskKind::Full,
            v_scale: 0.5,
            ..Layer::plain()
        },
    ]
}

/// Every width of keys, each with three widths of values; what else there is takes turns.
pub fn every_pair_of_widths() {
    let session = session();
    let storages = [
        paged(16, KvLayout::Nhd),
        Storage::Ragged,
        paged(8, KvLayout::Hnd),
        paged(64, KvLayout::Nhd),
        paged(128, KvLayout::Hnd),
    ];
    let lens = [(130, 300), (77, 77), (1, 200), (0, 40), (70, 64), (20, 0)];
    for n in 0..3 * WIDTHS {
        let (qk, turn) = (width(n), n / WIDTHS);
        let vo = [qk, width(5 * n + 3), width(11 * n + 20)][turn as usize];
        let (qo_heads, kv_heads) = [(2, 2), (8, 2), (3, 1), (6, 2)][(n % 4) as usize];
        let problem = Problem {
            head_dim_vo: vo,
            storage: storages[(n % 5) as usize],
            layer: layers()[((n + turn) % 4) as usize].clone(),
            ..Problem::plain(&lens)
                .of([DType::BF16, DType::F16][(n / 2 % 2) as usize])
                .heads(qo_heads, kv_heads, qk)
        };
        let problem = Problem {
            memory: gapped(&problem, n % 3, n % 2 == 0),
            ..problem
        };
        let got = solve(&*session, &DeviceMemory, &problem).unwrap();
        assert_right(&problem, &got);
    }
}

/// Few rows against many keys: partial results, whose rows are as long as those of o.
pub fn split_rows() {
    let session = session();
    for (n, dim) in [
        8, 40, 72, 80, 96, 104, 120, 136, 160, 184, 192, 216, 224, 248,
    ]
    .into_iter()
    .enumerate()
    {
        for (qk, vo) in [(dim, dim), (dim, width(n as u32 * 7))] {
            let problem = Problem {
                head_dim_vo: vo,
                storage: [Storage::paged(16), Storage::Ragged][n % 2],
                layer: Layer {
                    sinks: true,
                    v_scale: 2.0,
                    ..Layer::plain()
                },
                ..Problem::plain(&[(20, 4000), (1, 17), (33, 1100)])
                    .of(DType::BF16)
                    .heads(4, 2, qk)
            };
            let got = solve(&*session, &DeviceMemory, &problem).unwrap();
            assert_right(&problem, &got);
        }
    }
}

const WIDE: [(u32, u32); 6] = [
    (264, 264),
    (512, 512),
    (320, 512),
    (512, 64),
    (64, 512),
    (392, 296),
];

/// Every pair of types that the portable kernels are compiled for, and queries in fp8.
fn types_of_wide_rows() -> Vec<(DType, DType)> {
    let over_fp8 = |q| [(q, DType::F8E4M3), (q, DType::F8E5M2)];
    [DType::BF16, DType::F16, DType::F32]
        .into_iter()
        .flat_map(|q| [(q, q)].into_iter().chain(over_fp8(q)))
        .chain(over_fp8(DType::F8E4M3))
        .collect()
}

/// Few rows against many keys, whose partial results are as wide as o, and more rows than a tile has.
pub fn wide_rows() {
    let session = session();
    for (n, (q_dtype, kv_dtype)) in types_of_wide_rows().into_iter().enumerate() {
        for (m, (qk, vo)) in WIDE.into_iter().enumerate() {
            for (kind, lens) in [
                (Kind::Decode, [(1, 3000), (2, 17), (0, 40)]),
                (Kind::Prefill, [(50, 90), (1, 1500), (33, 20)]),
            ] {
                let layer = &layers()[(n + m) % 4];
                let problem = Problem {
                    kind,
                    kv_dtype,
                    o_dtype: if q_dtype.is_fp8() {
                        DType::BF16
                    } else {
                        q_dtype
                    },
                    head_dim_vo: vo,
                    storage: Storage::paged([16, 1, 64][m % 3]),
                    layer: Layer {
                        k_scales: HeadScales::PerHead,
                        ..layer.clone()
                    },
                    ..Problem::plain(&lens).of(q_dtype).heads(6, 2, qk)
                };
                let problem = Problem {
                    memory: gapped(&problem, (m % 2) as u32, n % 2 == 0),
                    ..problem
                };
                let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                assert_right(&problem, &got);
            }
        }
    }
}

/// Queries in bf16 beyond the range of fp16, and below it, over fp8 caches: decode's rows become fp16 whatever their size is.
pub fn bf16_queries_of_any_size() {
    for (exponents, dim) in [
        ([50, 50], 512),
        ([-50, -50], 512),
        ([50, 50], 128),
        ([-50, -50], 64),
    ] {
        for layer in layers() {
            check_queries(
                Kind::Decode,
                &[(1, 3000), (2, 17), (0, 40)],
                dim,
                exponents,
                &layer,
            );
            check_queries(
                Kind::Prefill,
                &[(50, 90), (1, 1500), (33, 20)],
                dim,
                exponents,
                &layer,
            );
        }
    }
}

/// The same near the ends of bf16's range, of rows of zeros, and of heads of different sizes, by the kernels for few rows.
pub fn bf16_queries_of_extreme_sizes() {
    let lens = [(1, 700), (2, 17), (0, 40)];
    for dim in [64, 128, 192] {
        for exponents in [
            [100, 100],
            [-100, -100],
            [-200, -200],
            [50, 41],
            [50, 0],
            [0, -50],
            [50, -200],
        ] {
            for layer in layers() {
                check_queries(Kind::Decode, &lens, dim, exponents, &layer);
            }
        }
        for requests in [[(2, 700), (1, 5)], [(8, 700), (7, 90)]] {
            check_queries(Kind::Decode, &requests, dim, [0, -50], &Layer::plain());
        }
    }
}

/// Logits are of the usual size in the larger of two neighbouring heads, or too small to differ.
fn check_queries(
    kind: Kind,
    lens: &[(u32, u32)],
    dim: u32,
    query_exponents: [i32; 2],
    layer: &Layer,
) {
    // Runs take scales up to 2^60. To rows of zeros one is given that fp32 has no product of with the least power of two.
    let exponent = match query_exponents[0] {
        ..-150 => 40,
        exponent => exponent.max(-59),
    };
    let sm_scale = 2f32.powi(-exponent) / (dim as f32).sqrt();
    let session = session();
    for kv_dtype in [DType::F8E4M3, DType::F8E5M2] {
        let problem = Problem {
            kind,
            kv_dtype,
            query_exponents,
            layer: Layer {
                sm_scale,
                ..layer.clone()
            },
            ..Problem::plain(lens).of(DType::BF16).heads(6, 2, dim)
        };
        let got = solve(&*session, &DeviceMemory, &problem).unwrap();
        assert_right(&problem, &got);
    }
}

/// Random problems whose keys, values or both are wider by 256.
pub fn random_wide_rows() {
    let session = session();
    let wide = (problems(), 0..3).prop_map(|(problem, which)| {
        let wider = |dim: u32, is_wider| if is_wider { dim + 256 } else { dim };
        let problem = Problem {
            head_dim_qk: wider(problem.head_dim_qk, which != 1),
            head_dim_vo: wider(problem.head_dim_vo, which != 2),
            ..problem
        };
        within_budget(problem, 1 << 23)
    });
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(300)
    });
    let result = runner.run(&wide, |problem| {
        check(&problem, solve(&*session, &DeviceMemory, &problem)).map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
