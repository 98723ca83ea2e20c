//! The configuration of suites over random cases: how many, and where the seeds of failing ones are kept, which
//! the next run tries first.

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
