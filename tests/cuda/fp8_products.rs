//! Prefill with probabilities in e4m3, where the caller permits them: a row's error is that of probabilities with four
//! bits, and the same code paths as elsewhere decide what a row sees.

use crate::common::codec::decode;
use crate::common::dense;
use crate::common::door::Session;
use crate::common::instance::{Output, solve};
use crate::common::problem::{
    Alibi, HeadScales, Layer, MaskKind, Pattern, Problem, Storage, ValueRows,
};
use crate::common::random;
use crate::common::values::Values;
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, session, solve_with};
use folio::dtype::DType;
use folio::problem::{Kind, LogBase};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Those that the kernel is compiled for, and narrower ones: of a piece, of a box and a part, of two boxes.
const DIMS: [u32; 10] = [16, 48, 64, 80, 96, 128, 144, 192, 224, 256];
/// Pages that boxes describe, and pages whose rows are copied one by one.
const PAGES: [u32; 12] = [1, 1, 3, 4, 8, 16, 20, 24, 32, 64, 128, 256];
/// The error of a row in parts of its norm, or of what independent errors of probabilities move where values nearly cancel each
/// other: 1/16 for each probability, and a little for scores and sums.
const ROW_ERROR: f64 = 0.068;
/// An e4m3 output adds a rounding of its own: this part of it, and of small elements half of e4m3's least number.
const E4M3_ERROR: f64 = 0.0625;
const HALF_LEAST_E4M3: f64 = 0.0009765625;
/// Of log-sum-exps: the probabilities' own errors, and what is lost of their sum.
const LSE_ERROR: f64 = 0.07;

fn check(problem: &Problem, got: &Output) -> Result<(), String> {
    let want = dense::attention(problem);
    let (heads, dim) = (
        problem.num_qo_heads() as usize,
        problem.head_dim_vo as usize,
    );
    let o_scale = Values::of(problem).o_divisor();
    let (of_output, least) = match problem.o_dtype.is_fp8() {
        true => (E4M3_ERROR, HALF_LEAST_E4M3 * o_scale * (dim as f64).sqrt()),
        false => (0.0, 0.0),
    };
    for (token, rows) in want.iter().enumerate() {
        for (head, row) in rows.iter().enumerate() {
            let at = token * heads + head;
            let o = got.o[at * dim..][..dim].iter();
            let o: Vec<f64> = o
                .map(|&bits| decode(problem.o_dtype, bits) * o_scale)
                .collect();
            let norm =
                |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
            let error = norm(&mut o.iter().zip(&row.o).map(|(got, want)| got - want));
            let size = norm(&mut row.o.iter().copied());
            // Where a row sees nothing only 0 passes; NaN never does.
            let bound = ROW_ERROR * size.max(row.spread) + of_output * size;
            let right = error <= bound + if row.keys > 0 { least } else { 0.0 };
            if !right {
                return Err(format!(
                    "o of token {token}, head {head}: error {error:e} of {size:e}, spread {:e}",
                    row.spread
                ));
            }
            let Some(lse) = &got.lse else { continue };
            let lse = f64::from(lse[at]);
            let right = lse == row.lse || (lse - row.lse).abs() <= LSE_ERROR;
            if !right {
                return Err(format!(
                    "lse of token {token}, head {head}: {lse}, not {}",
                    row.lse
                ));
            }
        }
    }
    Ok(())
}

fn problem(lens: &[(u32, u32)]) -> Problem {
    Problem {
        kind: Kind::Prefill,
        q_dtype: DType::F8E4M3,
        kv_dtype: DType::F8E4M3,
        o_dtype: DType::BF16,
        fp8_products: true,
        ..Problem::plain(lens).heads(8, 2, 128)
    }
}

fn layers() -> impl Strategy<Value = Layer> {
    let window = prop::option::weighted(
        0.4,
        (
            prop::sample::select(vec![-1, 0, 7, 64, 95, 96, 128, 200]),
            prop::sample::select(vec![-1, 0, 5, 130]),
        ),
    );
    let mask = prop::sample::select(vec![MaskKind::Causal, MaskKind::Full]);
    let scale = prop::sample::select(vec![0.0f32, 0.02, 0.2, -0.05]);
    let cap = prop::sample::select(vec![0.0f32, 0.0, 5.0, 30.0]);
    let chunks = prop::option::weighted(0.2, Just((130u32, 1u32)));
    let scales = prop::sample::select(vec![
        HeadScales::Absent,
        HeadScales::PerHead,
        HeadScales::PerRequest,
    ]);
    (window, mask, scale, cap, chunks, scales, any::<[bool; 3]>()).prop_map(
        |(window, mask, sm_scale, logits_soft_cap, chunks, scales, [sinks, scaled, lse])| Layer {
            window,
            mask,
            sm_scale,
            logits_soft_cap,
            chunks,
            sinks,
            q_scale: if scaled { 0.75 } else { 0.0 },
            v_scale: if scaled { 0.5 } else { 0.0 },
            q_scales: scales,
            k_scales: scales,
            v_scales: scales,
            lse: lse.then_some(LogBase::E),
            ..Layer::plain()
        },
    )
}

fn problems() -> impl Strategy<Value = Problem> {
    // Several tiles of 192 rows at most, and steps of 64 to 128 keys.
    let request = prop_oneof![
        4 => (0u32..=60, 0u32..=300),
        1 => (100u32..=260, 90u32..=400),
    ];
    let heads = prop::sample::select(vec![(1u32, 1u32), (2, 2), (4, 1), (6, 2), (5, 1), (16, 1)]);
    let page = prop::sample::select(PAGES.to_vec());
    let o_dtype = prop::sample::select(vec![DType::BF16, DType::F16, DType::F32, DType::F8E4M3]);
    let requests = prop::collection::vec(request, 1..=3);
    let dim = prop::sample::select(DIMS.to_vec());
    (
        requests,
        (heads, dim),
        (page, 0u32..=3),
        o_dtype,
        layers(),
        any::<bool>(),
        any::<u64>(),
    )
        .prop_map(
            |(lens, (heads, dim), (page_size, unused_pages), o_dtype, layer, one_hot, seed)| {
                let (num_qo_heads, num_kv_heads) = heads;
                let is_ragged = page_size == 1 && unused_pages == 0;
                let mut storage = match is_ragged {
                    true => Storage::Ragged,
                    false => Storage::paged(page_size),
                };
                if let Storage::Paged {
                    unused_pages: n, ..
                } = &mut storage
                {
                    *n = unused_pages;
                }
                Problem {
                    o_dtype,
                    layer,
                    storage,
                    // Of ones an output is the weight of few keys, so that a wrong key shows in short
                    // rows. e4m3 has no numbers for such small weights.
                    values: if one_hot && !o_dtype.is_fp8() {
                        ValueRows::OneHot
                    } else {
                        ValueRows::Normal
                    },
                    seed,
                    ..problem(&lens).heads(num_qo_heads, num_kv_heads, dim)
                }
            },
        )
}

pub fn fp8_products() {
    random_problems(360, |session, problem| {
        solve(session, &DeviceMemory, problem)
    });
}

pub fn fp8_products_of_device_lengths() {
    random_problems(90, |session, problem| {
        solve_with(session, &DeviceMemory, problem)
    });
}

fn random_problems(
    cases: u32,
    solve: impl Fn(&dyn Session, &Problem) -> folio::error::Result<Output>,
) {
    let session = session();
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(cases)
    });
    let result = runner.run(&problems(), |problem| {
        let got =
            solve(&*session, &problem).map_err(|error| TestCaseError::fail(error.to_string()))?;
        check(&problem, &got).map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Long enough for several stretches of sums, and for requests that are split; logits as normal ones, and 4 times as wide.
pub fn long_fp8_products() {
    let session = session();
    let wide_logits = |dim: u32| 4.0 / (dim as f32).sqrt();
    let storages = [Storage::paged(16), Storage::paged(1), Storage::Ragged];
    for (dim, storage) in DIMS.into_iter().zip(storages.into_iter().cycle()) {
        for (sm_scale, scales) in [
            (0.0, HeadScales::Absent),
            (wide_logits(dim), HeadScales::Absent),
            (0.2, HeadScales::PerRequest),
        ] {
            for lens in [&[(20, 5000)][..], &[(100, 1700), (3, 4000), (97, 97)]] {
                let problem = Problem {
                    layer: Layer {
                        sm_scale,
                        q_scales: scales,
                        k_scales: scales,
                        v_scales: scales,
                        lse: Some(LogBase::E),
                        ..Layer::plain()
                    },
                    storage,
                    ..problem(lens).heads(4, 2, dim)
                };
                let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                if let Err(difference) = check(&problem, &got) {
                    panic!("{difference}\n{problem:?}");
                }
            }
        }
    }
}

/// Masks that the kernel does not have are another one's, on the same plan: with probabilities of 16 bits.
pub fn fp8_products_under_masks() {
    let session = session();
    let layers = [
        MaskKind::Bytes(Pattern::Tree),
        MaskKind::Bits(Pattern::Random(0.5)),
        MaskKind::CausalByRequest,
    ]
    .map(|mask| Layer {
        mask,
        q_scale: 0.75,
        v_scale: 0.5,
        ..Layer::plain()
    });
    let with_distances = Layer {
        alibi: Some(Alibi::Linear),
        logits_soft_cap: 20.0,
        ..Layer::plain()
    };
    for dim in [64, 96, 128, 160, 256] {
        for page_size in [16, 1] {
            for layer in layers.iter().chain([&with_distances]) {
                let problem = Problem {
                    layer: layer.clone(),
                    storage: Storage::paged(page_size),
                    ..problem(&[(100, 430), (3, 129), (64, 64), (17, 5)]).heads(8, 2, dim)
                };
                let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                assert_right(&problem, &got);
            }
        }
    }
}
