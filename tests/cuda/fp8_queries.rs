//! Queries in fp8, over fp8 caches: random problems, and long ones on the kernels of every phase.

use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::instance::solve;
use crate::common::problem::{Layer, Problem, Storage};
use crate::common::random;
use crate::common::strategy::problems;
use crate::gpu::DeviceMemory;
use crate::problems::{assert_right, session};
use folio::dtype::DType;
use folio::problem::{Kind, LogBase};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const FP8: [DType; 2] = [DType::F8E4M3, DType::F8E5M2];

/// Problems of every kind, with their queries and their cache in fp8.
fn in_fp8() -> impl Strategy<Value = Problem> {
    let output = prop::sample::select(vec![DType::BF16, DType::F16, DType::F32, DType::F8E4M3]);
    let fp8 = || prop::sample::select(FP8.to_vec());
    (problems(), fp8(), fp8(), output).prop_map(|(problem, q_dtype, kv_dtype, o_dtype)| {
        let mut problem = Problem {
            q_dtype,
            kv_dtype,
            o_dtype,
            ..problem
        };
        if !o_dtype.is_fp8() {
            problem.layer.o_scale = 0.0;
        }
        problem
    })
}

pub fn fp8_queries() {
    let session = session();
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(400)
    });
    let result = runner.run(&in_fp8(), |problem| {
        let got = solve(&*session, &DeviceMemory, &problem)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        let tolerance = Tolerance::of_matrix_unit(&problem).of_rounded_rows(&problem);
        compare(&problem, &dense::attention(&problem), &got, tolerance).map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Long enough to be split, on the kernels that take boxes of pages and on those that take rows.
pub fn long_fp8_queries() {
    let session = session();
    for (kind, lens) in [
        (Kind::Decode, [(1, 3000), (2, 17), (1, 700)]),
        // More rows than a decode kernel has.
        (Kind::Decode, [(33, 3000), (20, 40), (1, 700)]),
        (Kind::Prefill, [(5, 3000), (5, 17), (70, 100)]),
    ] {
        for dim in [64, 72, 128, 256] {
            for page_size in [16, 5] {
                for q_dtype in FP8 {
                    let problem = Problem {
                        kind,
                        q_dtype,
                        kv_dtype: DType::F8E4M3,
                        o_dtype: DType::BF16,
                        storage: Storage::paged(page_size),
                        layer: Layer {
                            sinks: true,
                            lse: Some(LogBase::E),
                            logits_soft_cap: 20.0,
                            q_scale: 0.75,
                            k_scale: 1.5,
                            v_scale: 0.5,
                            window: Some((2000, -1)),
                            ..Layer::plain()
                        },
                        ..Problem::plain(&lens).heads(8, 2, dim)
                    };
                    let got = solve(&*session, &DeviceMemory, &problem).unwrap();
                    assert_right(&problem, &got);
                }
            }
        }
    }
}
