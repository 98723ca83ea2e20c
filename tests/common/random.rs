//! The configuration of suites over random cases: how many, and where the seeds of failing ones are kept, which
//! the next run tries first. Also what several of them draw.

use folio::dtype::DType;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, FileFailurePersistence};

/// So many cases. Seeds of failing ones go to a file beside the suite, for everybody to replay.
pub fn cases(cases: u32) -> Config {
    let kept = FileFailurePersistence::WithSource("proptest-regressions");
    Config {
        cases,
        failure_persistence: Some(Box::new(kept)),
        ..Config::default()
    }
}

/// Types of four index tensors.
pub fn integers() -> impl Strategy<Value = [DType; 4]> {
    let integer = || select(vec![DType::I32, DType::I64]);
    [integer(), integer(), integer(), integer()]
}
