//! The attention contract: every backend of this machine, through every door, over random problems and
//! the peers' own grids. What each problem must come to is computed in `common::dense`.

use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::door::{DOORS, Door, RustDoor, Session};
use crate::common::instance::solve;
use crate::common::memory::HostMemory;
use crate::common::problem::{Layer, MaskKind, NAN_QUERIES, Pattern, Problem, ValueRows};
use crate::common::random;
use crate::common::strategy::{host_problems, stored_problems};
use folio::api::Target;
use folio::dtype::DType;
use folio::problem::{CacheForm, Kind, LogBase};
use proptest::prelude::*;

const CPU: Target = Target::Cpu { num_threads: 2 };

fn open(door: &dyn Door, target: Target) -> Box<dyn Session> {
    door.open(target).expect("a CPU context")
}

/// Solves a problem and compares.
fn check(session: &dyn Session, problem: &Problem, tolerance: Tolerance) -> Result<(), String> {
    let got = solve(session, &HostMemory, problem).map_err(|error| error.to_string())?;
    compare(problem, &dense::attention(problem), &got, tolerance)
}

proptest! {
    #![proptest_config(random::cases(400))]

    #[test]
    fn the_oracle_agrees_with_dense_attention(problem in host_problems()) {
        let session = open(&RustDoor, Target::Reference);
        let result = check(&*session, &problem, Tolerance::oracle());
        prop_assert_eq!(result, Ok(()));
    }
}

proptest! {
    #![proptest_config(random::cases(600))]

    #[test]
    fn the_cpu_agrees_with_dense_attention(problem in host_problems()) {
        for door in DOORS {
            let session = open(door, CPU);
            let tolerance = Tolerance::fast(problem.q_dtype);
            let result = check(&*session, &problem, tolerance);
            prop_assert!(result.is_ok(), "{} door: {}", door.name(), result.unwrap_err());
        }
    }
}

proptest! {
    #![proptest_config(random::cases(150))]

    #[test]
    fn the_oracle_reads_caches_of_every_form(problem in stored_problems()) {
        let session = open(&RustDoor, Target::Reference);
        let result = check(&*session, &problem, Tolerance::oracle());
        prop_assert_eq!(result, Ok(()));
    }
}

proptest! {
    #![proptest_config(random::cases(250))]

    #[test]
    fn the_cpu_reads_caches_of_every_form(problem in stored_problems()) {
        for door in DOORS {
            let session = open(door, CPU);
            let tolerance = Tolerance::fast(problem.q_dtype);
            let result = check(&*session, &problem, tolerance);
            prop_assert!(result.is_ok(), "{} door: {}", door.name(), result.unwrap_err());
        }
    }
}

/// Solves a problem on the CPU through both doors.
#[track_caller]
fn check_on_cpu(problem: &Problem) {
    for door in DOORS {
        let tolerance = Tolerance::fast(problem.q_dtype);
        let result = check(&*open(door, CPU), problem, tolerance);
        assert_eq!(result, Ok(()), "{} door: {problem:?}", door.name());
    }
}

/// Queries in fp8, of few rows and of many, over both types of caches and with every type of output.
#[test]
fn queries_in_fp8() {
    let (e4m3, e5m2) = (DType::F8E4M3, DType::F8E5M2);
    for (q_dtype, kv_dtype) in [(e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3), (e5m2, e5m2)] {
        for o_dtype in [DType::BF16, DType::F16, DType::F32, e4m3] {
            for (kind, lens) in [
                (Kind::Decode, [(1, 800), (3, 715)]),
                (Kind::Prefill, [(40, 800), (150, 790)]),
            ] {
                let problem = Problem {
                    kind,
                    q_dtype,
                    kv_dtype,
                    o_dtype,
                    layer: Layer {
                        sinks: true,
                        lse: Some(LogBase::E),
                        q_scale: 0.75,
                        k_scale: 1.5,
                        v_scale: 0.5,
                        window: Some((600, -1)),
                        ..Layer::plain()
                    },
                    ..Problem::plain(&lens).heads(4, 2, 72)
                };
                check_on_cpu(&problem);
            }
        }
    }
}

/// An lse in 16 bits, of few rows and of many, of rows that are split and of those that see nothing.
#[test]
fn an_lse_of_16_bits() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for lse_dtype in [DType::F16, DType::BF16] {
            for (lse, kind, lens) in [
                (LogBase::E, Kind::Decode, [(1, 4000), (2, 0), (3, 715)]),
                (LogBase::Two, Kind::Prefill, [(40, 800), (3, 0), (150, 790)]),
            ] {
                let mut problem = Problem::plain(&lens).of(dtype).heads(4, 2, 64);
                problem.kind = kind;
                problem.memory.lse_head_major = lse == LogBase::Two;
                problem.layer.lse = Some(lse);
                problem.layer.lse_dtype = lse_dtype;
                check_on_cpu(&problem);
            }
        }
    }
}

/// What no row sees may be infinite or no number, in any tile of keys; its weight of 0 must not meet it.
#[test]
fn hidden_memory_between_seen_keys_is_not_used() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for from in [0, 260, 520, 700] {
            for (kind, lens) in [
                (Kind::Decode, [(1, 800), (3, 715)]),
                (Kind::Prefill, [(40, 800), (150, 790)]),
            ] {
                let mut problem = Problem::plain(&lens).of(dtype).heads(4, 2, 40);
                problem.kind = kind;
                problem.layer.mask = MaskKind::Bits(Pattern::Holes(from));
                check_on_cpu(&problem);
            }
        }
    }
}

/// The same of scales that stand beside a cache: those of hidden keys are no numbers.
#[test]
fn hidden_scales_between_seen_keys_are_not_used() {
    for (form, element) in [
        (CacheForm::TokenHeadScales, DType::I8),
        (CacheForm::TokenHeadScales, DType::F8E4M3),
        (CacheForm::Nvfp4, DType::F4E2M1x2),
        (CacheForm::PackedKeys, DType::BF16),
    ] {
        for from in [0, 260] {
            for (kind, lens) in [
                (Kind::Decode, [(1, 400), (3, 315)]),
                (Kind::Prefill, [(40, 400), (70, 390)]),
            ] {
                let problem = Problem::plain(&lens).of(DType::BF16).heads(4, 2, 48);
                let mut problem = problem.stored(form, element);
                problem.kind = kind;
                problem.layer.mask = MaskKind::Bits(Pattern::Holes(from));
                check_on_cpu(&problem);
            }
        }
    }
}

/// One wrong row of V among thousands shows, whatever the type.
#[test]
fn every_row_of_v_counts() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (kind, lens) in [
            (Kind::Decode, [(1, 2000), (2, 3001)]),
            (Kind::Prefill, [(17, 2000), (130, 1501)]),
        ] {
            let mut problem = Problem::plain(&lens).of(dtype).heads(4, 2, 64);
            problem.kind = kind;
            problem.values = ValueRows::OneHot;
            check_on_cpu(&problem);
            problem.kv_dtype = DType::F8E4M3;
            check_on_cpu(&problem);
        }
    }
}

/// A row in more parts than are combined at a time.
#[test]
fn a_row_of_hundreds_of_parts_is_put_together() {
    let mut problem = Problem::plain(&[(1, 258 * 1024 + 5)]).heads(1, 1, 8);
    problem.kind = Kind::Decode;
    problem.batch_invariant = true;
    check_on_cpu(&problem);
}

/// A row whose only key is no number: the parts that saw nothing must not hide that.
#[test]
fn one_part_of_a_row_may_be_no_number() {
    for part in [0, 90, 200] {
        let mut problem = Problem::plain(&[(1, 5000), (1, 4000)]).heads(2, 1, 16);
        problem.kind = Kind::Decode;
        problem.requests[0].tag = NAN_QUERIES;
        problem.layer.mask = MaskKind::Bits(Pattern::Range(part, part + 1));
        check_on_cpu(&problem);
    }
}
