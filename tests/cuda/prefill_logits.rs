//! Logits of prefill that are more than a scale: soft caps and biases by distance, on every Hopper kernel of 16-bit
//! products.

use crate::common::instance::solve;
use crate::common::problem::{Alibi, HeadScales, Layer, MaskKind, Problem, Storage};
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, session};
use folio::dtype::DType;

/// Every tile of the kernels, and the elements of keys and values.
const DIMS: [(u32, u32); 8] = [
    (64, 64),
    (80, 80),
    (112, 112),
    (128, 128),
    (160, 160),
    (192, 128),
    (224, 224),
    (256, 256),
];

/// Around steps and tiles, and rows of a few keys.
const LENS: [(u32, u32); 6] = [(150, 430), (70, 70), (1, 300), (0, 40), (9, 3), (40, 900)];

/// Paged, ragged, and row by row; fp8 keys come row by row too.
fn storages(n: usize) -> (Storage, Option<DType>) {
    let paged = Storage::paged([16, 64, 8][n / 4 % 3]);
    [
        (paged, None),
        (Storage::Ragged, None),
        (Storage::paged(1), None),
        (Storage::paged(16), Some(DType::F8E4M3)),
    ][n % 4]
}

fn check(n: usize, layer: Layer) {
    let (storage, cached) = storages(n);
    let q_dtype = [DType::BF16, DType::F16][n % 3 % 2];
    let (qk, vo) = DIMS[n % DIMS.len()];
    let (qo_heads, kv_heads) = [(4, 1), (3, 3), (6, 2), (5, 1), (17, 1)][n % 5];
    solve_and_check(Problem {
        kv_dtype: cached.unwrap_or(q_dtype),
        head_dim_vo: vo,
        storage,
        layer,
        ..Problem::plain(&LENS)
            .of(q_dtype)
            .heads(qo_heads, kv_heads, qk)
    });
}

/// The layer with scales of k and v for each request, or with none.
fn of_requests(scaled: bool, layer: Layer) -> Layer {
    let scales = match scaled {
        true => HeadScales::PerRequest,
        false => HeadScales::Absent,
    };
    Layer {
        k_scales: scales,
        v_scales: scales,
        ..layer
    }
}

fn solve_and_check(problem: Problem) {
    let got = solve(&*session(), &DeviceMemory, &problem);
    let got = got.unwrap_or_else(|error| panic!("{error}\n{problem:?}"));
    assert_right(&problem, &got);
}

/// Logits of a standard deviation of `spread`: next to zero beside the cap, within it, and far above.
pub fn soft_caps() {
    let mut n = 0;
    for cap in [50.0, 48.0, 30.0, 5.0] {
        for spread in [0.5, 2.0, 5.0, 15.0, 80.0] {
            for (mask, window) in [
                (MaskKind::Causal, None),
                (MaskKind::Full, None),
                (MaskKind::Causal, Some((70, 0))),
            ] {
                let (qk, _) = DIMS[n % DIMS.len()];
                let layer = Layer {
                    mask,
                    window,
                    logits_soft_cap: cap,
                    sm_scale: spread / (qk as f32).sqrt(),
                    sinks: n % 5 == 0,
                    alibi: (n % 11 == 0).then_some(Alibi::Linear),
                    ..Layer::plain()
                };
                check(n, of_requests(n / 16 % 2 == 1, layer));
                n += 1;
            }
        }
    }
}

/// Biases by distance in every form, also where products are multiplied by what is not positive.
pub fn distances() {
    for n in 0..48 {
        let layer = Layer {
            mask: [MaskKind::Causal, MaskKind::Full][n / 8 % 2],
            window: (n % 7 == 0).then_some((100, 30)),
            alibi: Some([Alibi::Linear, Alibi::Sqrt][usize::from(n % 9 == 8)]),
            alibi_by_request: n % 13 == 12,
            sm_scale: [0.0, -0.1, 0.0][n % 3],
            ..Layer::plain()
        };
        check(n, of_requests(n / 16 % 2 == 1, layer));
    }
}

/// The same on the kernels whose runs all have a soft cap: every size of theirs, paged and ragged, and the cap above which
/// they are not asked. Logits are where the series holds, partly or all beyond it, of either sign, and wider than float's
/// exponents would be without a cap.
pub fn caps_alone() {
    let mut n = 0;
    let dims = [
        ((8, 2), 128),
        ((3, 3), 128),
        ((4, 2), 256),
        ((8, 1), 64),
        ((8, 2), 80),
        ((3, 3), 88),
        ((8, 2), 112),
        ((3, 3), 120),
    ];
    let storages = [16, 64, 1].map(Storage::paged);
    for (heads, dim) in dims {
        for storage in storages.into_iter().chain([Storage::Ragged]) {
            for (cap, spread) in [
                (50.0, 1.0),
                (30.0, -1.0),
                (64.0, 9.0),
                (50.0, -30.0),
                (5.0, 300.0),
                (64.5, 1.0),
            ] {
                let layer = Layer {
                    mask: [MaskKind::Causal, MaskKind::Full][n % 3 / 2],
                    window: (n % 4 == 1).then_some((70, 0)),
                    logits_soft_cap: cap,
                    sm_scale: spread / (dim as f32).sqrt(),
                    sinks: n % 5 == 0,
                    ..Layer::plain()
                };
                let layer = of_requests(n / 6 % 2 == 1, layer);
                solve_and_check(alone(DType::BF16, heads, dim, storage, layer));
                n += 1;
            }
        }
    }
}

/// The same of biases by distance.
pub fn slopes_alone() {
    let mut n = 0;
    for q_dtype in [DType::BF16, DType::F16] {
        for storage in [Storage::paged(16), Storage::Ragged, Storage::paged(8)] {
            for (heads, dim) in [
                ((8, 2), 128),
                ((16, 16), 128),
                ((12, 4), 128),
                ((8, 1), 64),
                ((8, 2), 120),
                ((6, 6), 40),
                ((8, 2), 96),
            ] {
                let layer = Layer {
                    mask: [MaskKind::Causal, MaskKind::Full][n / 4 % 2],
                    window: (n % 5 == 1).then_some((100, 30)),
                    alibi: Some(Alibi::Linear),
                    sm_scale: [0.0, -0.1, 0.3][n % 3],
                    sinks: n % 5 == 0,
                    ..Layer::plain()
                };
                let layer = of_requests(n / 3 % 2 == 1, layer);
                solve_and_check(alone(q_dtype, heads, dim, storage, layer));
                n += 1;
            }
        }
    }
}

fn alone(
    q_dtype: DType,
    (qo_heads, kv_heads): (u32, u32),
    dim: u32,
    storage: Storage,
    layer: Layer,
) -> Problem {
    Problem {
        storage,
        layer,
        ..Problem::plain(&LENS)
            .of(q_dtype)
            .heads(qo_heads, kv_heads, dim)
    }
}
