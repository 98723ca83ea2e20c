//! What a result may not depend on: the rest of the batch, the number of threads, the page table's form,
//! the memory layout, the plans before, and which layers ran on the same plan.

use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::door::{DOORS, Session};
use crate::common::instance::{LayerData, Output, Planned, solve};
use crate::common::memory::HostMemory;
use crate::common::problem::{Layer, MaskKind, Pattern, Problem, Request, Storage, TableForm};
use crate::common::random;
use crate::common::strategy::{layers, problems, stored_problems};
use folio::api::Target;
use folio::dtype::DType;
use folio::problem::{Kind, KvLayout};
use proptest::prelude::*;

fn cpu(num_threads: u32) -> Vec<Box<dyn Session>> {
    let open = |door: &&dyn crate::common::door::Door| door.open(Target::Cpu { num_threads });
    DOORS
        .iter()
        .map(|door| open(door).expect("a CPU context"))
        .collect()
}

/// The rows of request `b` within a batch's output.
fn rows_of(problem: &Problem, output: &Output, b: usize) -> Output {
    let indptr = problem.qo_indptr();
    let heads = problem.num_qo_heads() as usize;
    let range = |width: usize| indptr[b] as usize * width..indptr[b + 1] as usize * width;
    Output {
        o: output.o[range(heads * problem.head_dim_vo as usize)].to_vec(),
        lse: output.lse.as_ref().map(|lse| lse[range(heads)].to_vec()),
    }
}

fn without_shared_pages(mut problem: Problem) -> Problem {
    if let Storage::Paged { shared_pages, .. } = &mut problem.storage {
        *shared_pages = 0;
    }
    problem
}

/// Bit patterns, so that equal infinities are equal and different zeros are not.
fn bits(output: &Output) -> (Vec<u64>, Option<Vec<u32>>) {
    let lse = output.lse.as_ref();
    let lse = lse.map(|lse| lse.iter().map(|value| value.to_bits()).collect());
    (output.o.clone(), lse)
}

proptest! {
    #![proptest_config(random::cases(100))]

    #[test]
    fn a_batch_invariant_result_does_not_depend_on_the_batch(
        problem in prop_oneof![2 => problems(), 1 => stored_problems()],
    ) {
        let mut problem = without_shared_pages(problem);
        problem.batch_invariant = true;
        for session in cpu(2) {
            let whole = solve(&*session, &HostMemory, &problem).unwrap();
            for b in 0..problem.requests.len() {
                let alone = solve(&*session, &HostMemory, &problem.alone(b)).unwrap();
                prop_assert_eq!(bits(&alone), bits(&rows_of(&problem, &whole, b)), "request {}", b);
            }
        }
    }

    #[test]
    fn the_number_of_threads_does_not_matter(
        problem in prop_oneof![2 => problems(), 1 => stored_problems()],
        batch_invariant: bool,
    ) {
        let problem = Problem { batch_invariant, ..problem };
        for (one, three) in cpu(1).iter().zip(cpu(3)) {
            let first = solve(&**one, &HostMemory, &problem).unwrap();
            let second = solve(&*three, &HostMemory, &problem).unwrap();
            if batch_invariant {
                prop_assert_eq!(bits(&first), bits(&second));
            }
            for _ in 0..2 {
                let again = solve(&*three, &HostMemory, &problem).unwrap();
                prop_assert_eq!(bits(&again), bits(&second), "two runs");
            }
        }
    }

    #[test]
    fn one_plan_serves_layers_that_differ(
        problem in problems(),
        others in prop::collection::vec(layers(), 1..4),
    ) {
        for session in cpu(2) {
            let handle = session.attention(problem.desc()).unwrap();
            let planned = Planned::new(handle, &HostMemory, &HostMemory, &problem).unwrap();
            for (tag, layer) in (1..).zip(&others) {
                let o_scale = if problem.o_dtype.is_fp8() { layer.o_scale } else { 0.0 };
                let layer = Layer { tag, o_scale, ..layer.clone() };
                let problem = problem.with_layer(layer);
                let got = planned.run(&LayerData::new(&HostMemory, &problem)).unwrap();
                let tolerance = Tolerance::fast(problem.q_dtype);
                let result = compare(&problem, &dense::attention(&problem), &got, tolerance);
                prop_assert_eq!(result, Ok(()), "layer {}", tag);
            }
        }
    }

    #[test]
    fn a_plan_replaces_the_one_before(problem in problems(), order in any::<[u8; 3]>()) {
        let problem = without_shared_pages(problem);
        // Every batch lies within the maxima of the first.
        let batches: Vec<Problem> = order.iter().map(|&pick| {
            let mut batch = problem.clone();
            let n = batch.requests.len();
            batch.requests.rotate_left(if n == 0 { 0 } else { usize::from(pick) % n });
            batch.requests.truncate(n - if n == 0 { 0 } else { usize::from(pick / 16) % n });
            batch.seed ^= u64::from(pick);
            batch
        }).collect();
        for session in cpu(2) {
            let mut planned: Option<Planned<'_>> = None;
            for batch in &batches {
                match &mut planned {
                    None => {
                        let handle = session.attention(problem.desc()).unwrap();
                        planned = Some(Planned::new(handle, &HostMemory, &HostMemory, batch).unwrap());
                    }
                    Some(planned) => planned.replan(&HostMemory, batch).unwrap(),
                }
                let layer = LayerData::new(&HostMemory, batch);
                let got = planned.as_ref().unwrap().run(&layer).unwrap();
                let tolerance = Tolerance::fast(batch.q_dtype);
                let result = compare(batch, &dense::attention(batch), &got, tolerance);
                prop_assert_eq!(result, Ok(()));
            }
        }
    }
}

/// The same tokens through every page size, layout and form of table, ragged as well. Where they are cut
/// may differ, so the sums may round differently; with a page size that divides the other's and one
/// request, the oracle and any backend must still agree with dense attention to the same tolerance.
#[test]
fn pages_and_layouts_do_not_matter() {
    let lens = [
        (1, 100),
        (7, 64),
        (33, 33),
        (0, 5),
        (3, 0),
        (2, 1),
        (5, 130),
    ];
    let mut storages = vec![
        Storage::Ragged,
        Storage::Paged {
            page_size: 1,
            layout: KvLayout::Nhd,
            form: TableForm::TokenSlots,
            unused_pages: 3,
            shared_pages: 0,
        },
    ];
    for page_size in [1, 2, 3, 5, 8, 16, 32, 64, 128] {
        for layout in [KvLayout::Nhd, KvLayout::Hnd] {
            for form in [
                TableForm::CsrLastPageLen,
                TableForm::CsrKvLen { spare_pages: 2 },
                TableForm::BlockTable { spare_columns: 3 },
            ] {
                storages.push(Storage::Paged {
                    page_size,
                    layout,
                    form,
                    unused_pages: 4,
                    shared_pages: 0,
                });
            }
        }
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut problem = Problem::plain(&lens).of(dtype);
        let want = dense::attention(&problem);
        for session in cpu(2) {
            for &storage in &storages {
                problem.storage = storage;
                let got = solve(&*session, &HostMemory, &problem).unwrap();
                let result = compare(&problem, &want, &got, Tolerance::fast(dtype));
                assert_eq!(result, Ok(()), "{storage:?} in {dtype}");
            }
        }
    }
}

/// A run on a new workspace, whose bits are all ones, and one on what a batch with more keys left there.
#[test]
fn what_the_workspace_held_does_not_matter() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut long = Problem::plain(&[(9, 300)]).of(dtype);
        long.layer.mask = MaskKind::Bytes(Pattern::Random(0.5));
        let short = Problem {
            requests: Problem::plain(&[(9, 40)]).requests,
            ..long.clone()
        };
        for session in cpu(1) {
            let handle = session.attention(long.desc()).unwrap();
            let mut planned = Planned::new(handle, &HostMemory, &HostMemory, &short).unwrap();
            let layer = LayerData::new(&HostMemory, &short);
            let first = planned.run(&layer).unwrap();
            planned.replan(&HostMemory, &long).unwrap();
            planned.run(&LayerData::new(&HostMemory, &long)).unwrap();
            planned.replan(&HostMemory, &short).unwrap();
            let again = planned.run(&layer).unwrap();
            assert_eq!(bits(&first), bits(&again), "{dtype}");
        }
    }
}

#[test]
fn decode_and_prefill_handles_agree() {
    let problem = Problem::plain(&[(1, 77), (1, 16), (1, 300), (1, 1)]);
    for session in cpu(2) {
        for uniform_rows in [false, true] {
            let decode = Problem {
                kind: Kind::Decode,
                uniform_rows,
                ..problem.clone()
            };
            let want = dense::attention(&decode);
            let got = solve(&*session, &HostMemory, &decode).unwrap();
            assert_eq!(
                compare(&decode, &want, &got, Tolerance::fast(DType::F32)),
                Ok(())
            );
            let prefill = solve(&*session, &HostMemory, &problem).unwrap();
            assert_eq!(
                compare(&problem, &want, &prefill, Tolerance::fast(DType::F32)),
                Ok(())
            );
        }
    }
}

#[test]
fn a_batch_without_requests_or_rows_runs() {
    for session in cpu(2) {
        for lens in [&[][..], &[(0, 0)], &[(0, 9), (0, 17)]] {
            for kind in [Kind::Decode, Kind::Prefill] {
                let mut problem = Problem::plain(lens);
                problem.kind = kind;
                problem.memory.padded_rows = 2;
                let got = solve(&*session, &HostMemory, &problem).unwrap();
                assert!(got.o.is_empty());
            }
        }
    }
}

/// One shape, run again after a run: outputs are a function of the inputs only.
#[test]
fn a_result_is_the_same_to_the_bit_when_run_again() {
    let mut problem = Problem::plain(&[(1, 900), (4, 77), (60, 130)]).of(DType::BF16);
    problem.requests.push(Request {
        qo_len: 1,
        kv_len: 1500,
        tag: 9,
    });
    for session in cpu(2) {
        let handle = session.attention(problem.desc()).unwrap();
        let planned = Planned::new(handle, &HostMemory, &HostMemory, &problem).unwrap();
        let layer = LayerData::new(&HostMemory, &problem);
        let first = planned.run(&layer).unwrap();
        for _ in 0..5 {
            assert_eq!(bits(&planned.run(&layer).unwrap()), bits(&first));
        }
    }
}

/// A prompt of so many query tiles that they might be cut in another way, were it alone or on more threads.
#[test]
fn a_long_prompt_does_not_depend_on_batch_or_threads() {
    for dtype in [DType::F32, DType::BF16] {
        let mut problem = Problem::plain(&[(7, 900), (2100, 2100), (1, 40)])
            .of(dtype)
            .heads(1, 1, 16);
        problem.batch_invariant = true;
        // One for each door: with FOLIO_TEST_ISA they may run on different instruction sets.
        let mut first: Vec<Output> = Vec::new();
        for num_threads in [1, 2, 5] {
            for (door, session) in cpu(num_threads).into_iter().enumerate() {
                let whole = solve(&*session, &HostMemory, &problem).unwrap();
                for b in 0..problem.requests.len() {
                    // The handle is the same: another desc may be given another cut.
                    let one = problem.alone(b);
                    let handle = session.attention(problem.desc()).unwrap();
                    let planned = Planned::new(handle, &HostMemory, &HostMemory, &one).unwrap();
                    let alone = planned.run(&LayerData::new(&HostMemory, &one)).unwrap();
                    assert!(
                        bits(&alone) == bits(&rows_of(&problem, &whole, b)),
                        "request {b}"
                    );
                }
                if first.len() == door {
                    first.push(whole.clone());
                }
                assert!(bits(&first[door]) == bits(&whole), "{num_threads} threads");
            }
        }
    }
}
