//! Caches of other forms than rows of plain elements on the device: appends to the byte, gathers, and attention over random
//! problems in every form.

use crate::common::cascade::cascades_of_every_form;
use crate::common::compare::Tolerance;
use crate::common::formats::cases;
use crate::common::instance::Output;
use crate::common::memory::{HostMemory, Memory};
use crate::common::problem::Problem;
use crate::common::random;
use crate::common::strategy::stored_problems;
use crate::gpu::DeviceMemory;
use crate::problems::{compare_with_either, session, solve_with, with_a_page};
use folio::dtype::DType;
use folio::error::Error;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

pub fn append_and_gather() {
    let session = session();
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(600)
    });
    let result = runner.run(&cases(), |case| {
        case.check(&*session, &DeviceMemory)
            .map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

pub fn attention_with_host_lengths() {
    attention(400, &HostMemory, Problem::clone);
}

pub fn attention_with_device_lengths() {
    attention(200, &DeviceMemory, with_a_page);
}

fn attention(cases: u32, index_memory: &dyn Memory, change: impl Fn(&Problem) -> Problem) {
    let session = session();
    let mut runner = TestRunner::new(Config {
        source_file: Some(file!()),
        ..random::cases(cases)
    });
    let result = runner.run(&stored_problems(), |problem| {
        let problem = change(&problem);
        let got = solve_with(&*session, index_memory, &problem);
        check(&problem, got).map_err(TestCaseError::fail)
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// Queries that do not have 16 bits are refused.
fn check(problem: &Problem, got: folio::error::Result<Output>) -> Result<(), String> {
    let is_refused = !matches!(problem.q_dtype, DType::F16 | DType::BF16);
    match got {
        Err(Error::Unsupported(_)) if is_refused => Ok(()),
        Ok(_) if is_refused => Err(format!("queries in {} are taken", problem.q_dtype.name())),
        Err(error) => Err(error.to_string()),
        Ok(got) => compare_with_either(problem, &got),
    }
}

pub fn cascades() {
    cascades_of_every_form(&*session(), &DeviceMemory, Tolerance::of_codes);
}
