//! Caches of other forms than rows of plain elements on the device: appends to the byte, and gathers.

use crate::common::formats::cases;
use crate::common::random;
use crate::gpu::DeviceMemory;
use crate::problems::session;
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
