//! Absorbed multi-head latent attention: the oracle and the CPU through both doors, on every instruction set of this
//! machine, against the float64 formula of `common::mla`.

use crate::common::codec::{decode, encode, rounded};
use crate::common::compare::{Tolerance, compare};
use crate::common::door::{DOORS, Session};
use crate::common::instance::{Output, Planned};
use crate::common::memory::{HostMemory, Image, Resident, View};
use crate::common::mla::{
    self, Cache, MlaLayer, MlaProblem, Queries, check, problems, solve_on_host,
};
use crate::common::mla_forms::forms_agree;
use crate::common::mla_lists::{Lists, check_lists};
use crate::common::problem::{MaskKind, Problem, Request, TableForm};
use crate::common::random;
use crate::common::reserved::Reserved;
use crate::common::values::{mix, normal};
use folio::api::{Context, Stream, Target};
use folio::cpu::{CpuBackend, Isa};
use folio::dtype::DType;
use folio::log::Logger;
use folio::problem::AttentionArgs;
use proptest::prelude::*;

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn cpu(num_threads: u32) -> Vec<Box<dyn Session>> {
    let open = |door: &&dyn crate::common::door::Door| door.open(Target::Cpu { num_threads });
    DOORS
        .iter()
        .map(|door| open(door).expect("a CPU context"))
        .collect()
}

fn solved(session: &dyn Session, problem: &MlaProblem) -> Output {
    solve_on_host(session, problem).unwrap_or_else(|error| panic!("{error}: {problem:?}"))
}

/// The CPU, through both doors.
#[track_caller]
fn check_on_cpu(problem: &MlaProblem) {
    for session in cpu(2) {
        let result = check(problem, &solved(&*session, problem));
        assert_eq!(result, Ok(()), "{problem:?}");
    }
}

proptest! {
    #![proptest_config(random::cases(40))]

    #[test]
    fn the_oracle_agrees_with_the_formula(problem in problems()) {
        let want = mla::attention(&problem);
        for door in DOORS {
            let session = door.open(Target::Reference).unwrap();
            let got = solved(&*session, &problem);
            let result = compare(&problem.batch, &want, &got, Tolerance::oracle());
            prop_assert_eq!(result, Ok(()), "{} door", door.name());
        }
    }
}

proptest! {
    #![proptest_config(random::cases(50))]

    #[test]
    fn the_cpu_agrees_with_the_formula(problem in problems()) {
        for session in cpu(2) {
            let result = check(&problem, &solved(&*session, &problem));
            prop_assert_eq!(result, Ok(()));
        }
    }

    #[test]
    fn every_instruction_set_agrees_with_the_formula(problem in problems()) {
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let backend = CpuBackend::with_isa(2, isa).unwrap();
            let session = Context::with_backend(Box::new(backend), Logger::silent());
            let result = check(&problem, &solved(&session, &problem));
            prop_assert_eq!(result, Ok(()), "{:?}", isa);
        }
    }
}

proptest! {
    #![proptest_config(random::cases(25))]

    #[test]
    fn a_batch_invariant_result_does_not_depend_on_the_batch(problem in problems()) {
        let mut problem = problem;
        problem.batch.batch_invariant = true;
        if let crate::common::problem::Storage::Paged { shared_pages, .. } = &mut problem.batch.storage {
            *shared_pages = 0;
        }
        for session in cpu(3) {
            let whole = solved(&*session, &problem);
            for b in 0..problem.batch.requests.len() {
                let alone = solved(&*session, &problem.alone(b));
                prop_assert_eq!(bits(&alone), bits(&rows_of(&problem.batch, &whole, b)), "request {}", b);
            }
            let again = solved(&*session, &problem);
            prop_assert_eq!(bits(&again), bits(&whole), "two runs");
        }
    }

    #[test]
    fn how_queries_and_records_lie_does_not_change_a_bit(problem in problems()) {
        let mut problem = problem;
        if problem.cache == Cache::DsMla {
            problem.batch.kv_dtype = problem.batch.q_dtype;
        }
        let session = &cpu(2)[0];
        let of = |queries, cache| solved(&**session, &problem.clone().tensors(queries, cache));
        let want = bits(&of(Queries::One, Cache::Records));
        for queries in [Queries::One, Queries::Two] {
            for cache in [Cache::Records, Cache::Views, Cache::Two] {
                prop_assert_eq!(bits(&of(queries, cache)), want.clone(), "{:?} {:?}", queries, cache);
            }
        }
    }
}

/// The rows of request `b` within a batch's output.
fn rows_of(batch: &Problem, output: &Output, b: usize) -> Output {
    let indptr = batch.qo_indptr();
    let heads = batch.num_qo_heads() as usize;
    let range = |width: usize| indptr[b] as usize * width..indptr[b + 1] as usize * width;
    Output {
        o: output.o[range(heads * batch.head_dim_vo as usize)].to_vec(),
        lse: output.lse.as_ref().map(|lse| lse[range(heads)].to_vec()),
    }
}

fn bits(output: &Output) -> (Vec<u64>, Option<Vec<u32>>) {
    let lse = output.lse.as_ref();
    let lse = lse.map(|lse| lse.iter().map(|value| value.to_bits()).collect());
    (output.o.clone(), lse)
}

const FORMS: [TableForm; 3] = [
    TableForm::CsrLastPageLen,
    TableForm::CsrKvLen { spare_pages: 1 },
    TableForm::BlockTable { spare_columns: 2 },
];

/// The lengths of the peers' tests (FlashMLA's dense decoding, FlashInfer's and vLLM's MLA), every one with every
/// number of heads; the other dimensions of their grids in turn.
#[test]
fn the_grids_of_the_peers() {
    const LENS: [&[(u32, u32)]; 5] = [
        &[(1, 1027)],
        &[(1, 0), (2, 17)],
        &[(0, 20), (4, 140), (1, 20)],
        &[(1, 140), (2, 1027), (4, 17), (0, 0), (1, 0), (1, 20)],
        &[(3, 2), (17, 17)],
    ];
    const CACHES: [Cache; 4] = [Cache::Records, Cache::Views, Cache::Two, Cache::DsMla];
    let heads = [1, 3, 9, 16, 63, 64, 126, 128];
    let grid = heads
        .iter()
        .flat_map(|&heads| LENS.map(|lens| (heads, lens)));
    for (n, (heads, lens)) in random::of_grid((1_usize..).zip(grid).collect()) {
        let (rank, rope) = [
            (512, 64),
            (256, 64),
            (512, 64),
            (256, 32),
            (128, 32),
            (512, 0),
        ][n % 6];
        let dtype = FLOATS[n / 2 % 3];
        let problem = MlaProblem::plain(lens)
            .of(dtype)
            .heads(heads)
            .pages([1, 3, 16, 64][n % 4], FORMS[n % 3]);
        let queries = [Queries::One, Queries::Two][n / 3 % 2];
        let cache = CACHES[n / 2 % 4];
        let mut problem = match cache {
            Cache::DsMla => problem,
            _ => problem.dims(rank, rope),
        };
        problem.batch.kv_dtype = [dtype, DType::F8E4M3, dtype, DType::F8E5M2][n / 7 % 4];
        if n % 5 == 0 {
            problem.batch.layer.mask = MaskKind::Full;
        }
        check_on_cpu(&problem.tensors(queries, cache));
    }
}

/// One plan takes decodes, a draft of four and a prompt; then one with the same number of rows each, without offsets.
#[test]
fn single_uniform_and_ragged_queries() {
    for dtype in FLOATS {
        for cache in [Cache::Records, Cache::DsMla] {
            let mixed = MlaProblem::plain(&[(1, 300), (4, 90), (40, 40), (1, 1), (0, 7)]).of(dtype);
            check_on_cpu(&mixed.tensors(Queries::Two, cache));
            for rows in [1, 3] {
                let mut uniform = MlaProblem::plain(&[(rows, 300), (rows, 5), (rows, 0)]).of(dtype);
                uniform.batch.uniform_rows = true;
                check_on_cpu(&uniform.tensors(Queries::One, cache));
            }
        }
    }
}

/// Over fp8 records of either type, with outputs of either type of 16 bits and queries that hold parts of what they stand for.
#[test]
fn fp8_queries() {
    let types = [DType::F8E4M3, DType::F8E5M2];
    for (q_dtype, kv_dtype) in types.into_iter().flat_map(|q| types.map(|kv| (q, kv))) {
        for (cache, o_dtype) in [(Cache::Records, DType::BF16), (Cache::Two, DType::F16)] {
            let lens = [(1, 300), (4, 90), (40, 40), (1, 0), (0, 7)];
            let mut problem = MlaProblem::plain(&lens).tensors(Queries::Two, cache);
            let batch = &mut problem.batch;
            (batch.q_dtype, batch.kv_dtype, batch.o_dtype) = (q_dtype, kv_dtype, o_dtype);
            (batch.layer.q_scale, batch.layer.k_scale) = (2.0, 0.5);
            check_on_cpu(&problem);
        }
    }
}

/// Long rows that are split among threads, and far more heads than a tile of rows takes.
#[test]
fn long_requests_and_many_heads() {
    for cache in [Cache::Records, Cache::Two, Cache::DsMla] {
        for heads in [16, 200] {
            let problem = MlaProblem::plain(&[(1, 3000), (2, 700)]).heads(heads);
            check_on_cpu(&problem.tensors(Queries::Two, cache));
        }
    }
}

/// A layer that differs from the plan's first one: scales, base of lse, mask.
#[test]
fn one_plan_serves_layers_that_differ() {
    let problem = MlaProblem::plain(&[(2, 300), (1, 40)]);
    for session in cpu(2) {
        let handle = session.attention(problem.desc()).unwrap();
        let planned = Planned::new(handle, &HostMemory, &HostMemory, &problem.batch).unwrap();
        for tag in 0..4 {
            let mut problem = problem.clone();
            let layer = &mut problem.batch.layer;
            layer.tag = tag;
            layer.k_scale = [0.0, 0.5, -1.25, 2.0][tag as usize];
            layer.q_scale = [0.0, 0.75, 1.0, 0.0][tag as usize];
            layer.sm_scale = [0.1, -0.05, 0.07, 1e-3][tag as usize];
            let got = mla::run(&planned, &MlaLayer::new(&HostMemory, &problem)).unwrap();
            assert_eq!(check(&problem, &got), Ok(()), "layer {tag}");
        }
    }
}

/// Sparse attention: every query token has a list of its own.
#[test]
fn lists_of_tokens() {
    for cache in [Cache::Records, Cache::Two, Cache::DsMla] {
        let stored = |problem: MlaProblem| problem.tensors(Queries::Two, cache);
        for session in cpu(2) {
            check_lists(
                &*session,
                &HostMemory,
                Lists::Planned,
                (9, 300, 45),
                &stored,
            );
        }
    }
}

/// Pages more than 2^31 elements apart.
#[test]
fn far_pages() {
    const STRIDE: i64 = 6 << 30;
    let problem = MlaProblem::plain(&[(1, 75), (30, 40)]);
    for cache in [Cache::Records, Cache::DsMla] {
        let problem = problem.clone().tensors(Queries::One, cache);
        let reserved = Reserved::new(8 * STRIDE as usize);
        for session in cpu(2) {
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &HostMemory, &HostMemory, &problem.batch).unwrap();
            let layer = MlaLayer::new(&HostMemory, &problem);
            let near = layer.input();
            let far = reserved.spread(&near.k, STRIDE);
            let input = AttentionArgs {
                k: far,
                v: far,
                ..near
            };
            planned.run_args(&input).unwrap();
            assert_eq!(check(&problem, &layer.output()), Ok(()), "{cache:?}");
        }
    }
}

/// A number of one of the tensors of [`the_absorbed_form_is_that_of_the_heads`].
fn number(of: u64, index: [usize; 3], scale: f64) -> f64 {
    let hash = index.iter().fold(mix(of), |hash, &i| mix(hash ^ i as u64));
    normal(hash) * scale
}

/// The MQA form of given weights is the MHA form: heads of 16 + 8 over values of 16 (a small DeepSeek-V2), keys and values up-projected per head in
/// float64.
#[test]
fn the_absorbed_form_is_that_of_the_heads() {
    const HEADS: usize = 5;
    const NOPE: usize = 16;
    const ROPE: usize = 8;
    const RANK: usize = 32;
    const KEYS: usize = 150;
    let scale = (NOPE as f64 + ROPE as f64).powf(-0.5);
    let (w_uk, w_uv) = (
        |h: usize, p: usize, l: usize| number(1, [h, p, l], 0.2),
        |h: usize, l: usize, v: usize| number(2, [h, l, v], 0.2),
    );
    for (dtype, most) in [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 2e-2)] {
        let latent = |j: usize, l: usize| rounded(dtype, number(3, [j, l, 0], 1.0));
        let k_rope = |j: usize, r: usize| rounded(dtype, number(4, [j, r, 0], 1.0));
        let q_nope = |h: usize, p: usize| rounded(dtype, number(5, [h, p, 0], 1.0));
        let q_rope = |h: usize, r: usize| rounded(dtype, number(6, [h, r, 0], 1.0));
        let of = |shape: [i64; 3], value: &dyn Fn(&[i64]) -> f64| {
            let mut image = Image::poisoned(View::compact(dtype, &shape));
            crate::common::instance::for_each_index(&shape, |at| {
                image.put(at, encode(dtype, value(at)))
            });
            Resident::new(&HostMemory, image)
        };
        let absorbed = of([1, HEADS as i64, RANK as i64], &|at| {
            let (h, l) = (at[1] as usize, at[2] as usize);
            (0..NOPE).map(|p| q_nope(h, p) * w_uk(h, p, l)).sum()
        });
        let rotary = of([1, HEADS as i64, ROPE as i64], &|at| {
            q_rope(at[1] as usize, at[2] as usize)
        });
        let records = of([1, KEYS as i64, (RANK + ROPE) as i64], &|at| {
            let (j, d) = (at[1] as usize, at[2] as usize);
            if d < RANK {
                latent(j, d)
            } else {
                k_rope(j, d - RANK)
            }
        });
        let out = of([1, HEADS as i64, RANK as i64], &|_| f64::NAN);
        let problem = MlaProblem::plain(&[(1, KEYS as u32)])
            .of(dtype)
            .heads(HEADS as u32)
            .dims(RANK as u32, ROPE as u32)
            .pages(KEYS as u32, TableForm::CsrLastPageLen);
        // The only page is page 0.
        let mut problem = problem;
        problem.batch.storage = crate::common::problem::Storage::paged(KEYS as u32);
        for session in cpu(2) {
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &HostMemory, &HostMemory, &problem.batch).unwrap();
            let args = AttentionArgs {
                sm_scale: scale as f32,
                ..AttentionArgs::mla(
                    absorbed.tensor(),
                    Some(rotary.tensor()),
                    records.tensor(),
                    None,
                    out.tensor(),
                )
            };
            planned.handle.run(&args, Stream::default()).unwrap();
            let got = out.current();
            for h in 0..HEADS {
                let logits: Vec<f64> = (0..KEYS)
                    .map(|j| {
                        let k_nope =
                            |p| (0..RANK).map(|l| latent(j, l) * w_uk(h, p, l)).sum::<f64>();
                        let nope: f64 = (0..NOPE).map(|p| q_nope(h, p) * k_nope(p)).sum();
                        let rope: f64 = (0..ROPE).map(|r| q_rope(h, r) * k_rope(j, r)).sum();
                        (nope + rope) * scale
                    })
                    .collect();
                let sum: f64 = logits.iter().map(|s| s.exp()).sum();
                for v in 0..NOPE {
                    let value = |j| (0..RANK).map(|l| latent(j, l) * w_uv(h, l, v)).sum::<f64>();
                    let heads: f64 = (0..KEYS).map(|j| logits[j].exp() / sum * value(j)).sum();
                    let absorbed: f64 = (0..RANK)
                        .map(|l| decode(dtype, got.bits(&[0, h as i64, l as i64])) * w_uv(h, l, v))
                        .sum();
                    assert!(
                        (absorbed - heads).abs() < most,
                        "{dtype}: {absorbed} for {heads}"
                    );
                }
            }
        }
    }
}

/// The same by Folio's operators alone, from `kv_b_proj` to the input of `o_proj`: absorbed weights and queries, an append,
/// `folio_mla` and the output's projection, against the up-projection and attention with keys in two parts.
#[test]
fn both_forms_come_to_the_same() {
    for session in cpu(2) {
        forms_agree(&*session, &HostMemory, 16, &FLOATS);
    }
}

/// Scores and outputs of one query row of one head by both formulas: keys and values made of latent rows, or a query that is
/// taken to those and an output that is taken from them.
#[test]
fn both_formulas_are_one() {
    const NOPE: usize = 128;
    const ROPE: usize = 64;
    const VALUE: usize = 128;
    const RANK: usize = 512;
    const KEYS: usize = 200;
    let w_uk = |p: usize, l: usize| number(1, [p, l, 0], 0.05);
    let w_uv = |l: usize, v: usize| number(2, [l, v, 0], 0.05);
    let latent = |j: usize, l: usize| number(3, [j, l, 0], 1.0);
    let q: Vec<f64> = (0..NOPE).map(|p| number(5, [p, 0, 0], 1.0)).collect();
    let rope = |j: usize| -> f64 {
        (0..ROPE)
            .map(|r| number(6, [r, 0, 0], 1.0) * number(4, [j, r, 0], 1.0))
            .sum()
    };
    let absorbed: Vec<f64> = (0..RANK)
        .map(|l| (0..NOPE).map(|p| q[p] * w_uk(p, l)).sum())
        .collect();
    let softmax = |score: &dyn Fn(usize) -> f64| {
        let weights: Vec<f64> = (0..KEYS)
            .map(|j| ((score(j) + rope(j)) / 192f64.sqrt()).exp())
            .collect();
        let sum: f64 = weights.iter().sum();
        weights
            .into_iter()
            .map(move |weight| weight / sum)
            .collect::<Vec<f64>>()
    };
    let key = |j: usize, p: usize| (0..RANK).map(|l| latent(j, l) * w_uk(p, l)).sum::<f64>();
    let of_heads = softmax(&|j| (0..NOPE).map(|p| q[p] * key(j, p)).sum());
    let of_latent = softmax(&|j| (0..RANK).map(|l| absorbed[l] * latent(j, l)).sum());
    let o_latent: Vec<f64> = (0..RANK)
        .map(|l| (0..KEYS).map(|j| of_latent[j] * latent(j, l)).sum())
        .collect();
    for v in 0..VALUE {
        let value = |j: usize| (0..RANK).map(|l| latent(j, l) * w_uv(l, v)).sum::<f64>();
        let want: f64 = (0..KEYS).map(|j| of_heads[j] * value(j)).sum();
        let got: f64 = (0..RANK).map(|l| o_latent[l] * w_uv(l, v)).sum();
        assert!((got - want).abs() < 1e-12, "{v}: {got} for {want}");
    }
}

/// An lse in 16 bits, of few rows and of many.
#[test]
fn an_lse_of_16_bits() {
    for dtype in FLOATS {
        for lse_dtype in [DType::F16, DType::BF16] {
            let mut problem = MlaProblem::plain(&[(1, 900), (2, 0), (40, 70)]).of(dtype);
            problem.batch.layer.lse_dtype = lse_dtype;
            check_on_cpu(&problem);
        }
    }
}

/// Requests with equal numbers in any order give equal rows: the tag says which numbers.
#[test]
fn a_request_that_comes_twice_gives_the_same_rows_twice() {
    let mut problem = MlaProblem::plain(&[(2, 90), (1, 5), (2, 90)]);
    problem.batch.requests[2] = Request {
        ..problem.batch.requests[0]
    };
    problem.batch.batch_invariant = true;
    let got = solved(&*cpu(2)[0], &problem);
    let [first, last] = [0, 2].map(|b| bits(&rows_of(&problem.batch, &got, b)));
    assert_eq!(first, last);
}
