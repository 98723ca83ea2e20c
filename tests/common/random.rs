//! The configuration of suites over random cases: how many, and where the seeds of failing ones are kept, which
//! the next run tries first. Also what several of them draw.

use folio::dtype::DType;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, FileFailurePersistence};

/// The most cases of a test, where it is set: under emulation each takes some fifty times as long.
fn limit() -> Option<u32> {
    let limit = std::env::var("FOLIO_TEST_CASES").ok()?;
    Some(limit.parse().expect("FOLIO_TEST_CASES is a number"))
}

/// So many cases. Seeds of failing ones go to a file beside the suite, for everybody to replay.
pub fn cases(cases: u32) -> Config {
    let kept = FileFailurePersistence::WithSource("proptest-regressions");
    Config {
        cases: limit().map_or(cases, |limit| cases.min(limit)),
        failure_persistence: Some(Box::new(kept)),
        ..Config::default()
    }
}

/// The cases of a grid, or as many of them as the limit allows, from all of its parts.
pub fn of_grid<T>(grid: Vec<T>) -> Vec<T> {
    let step = limit().map_or(1, |limit| grid.len().div_ceil(limit as usize));
    grid.into_iter().step_by(step.max(1)).collect()
}

/// The same for grids of up to so many cases that are not lists: one case of this many is taken.
pub fn one_of_grid(most_cases: u32) -> u32 {
    limit().map_or(1, |limit| (most_cases / limit).max(1))
}

/// Types of four index tensors.
pub fn integers() -> impl Strategy<Value = [DType; 4]> {
    let integer = || select(vec![DType::I32, DType::I64]);
    [integer(), integer(), integer(), integer()]
}
