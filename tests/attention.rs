//! The attention contract: every backend of this machine, through every door, over random problems and
//! the peers' own grids. What each problem must come to is computed in `common::dense`.

mod common;

use common::compare::{Tolerance, compare};
use common::dense;
use common::door::{DOORS, Door, RustDoor, Session};
use common::instance::solve;
use common::memory::HostMemory;
use common::problem::Problem;
use common::random;
use common::strategy::problems;
use folio::api::Target;
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
    fn the_oracle_agrees_with_dense_attention(problem in problems()) {
        let session = open(&RustDoor, Target::Reference);
        let result = check(&*session, &problem, Tolerance::oracle());
        prop_assert_eq!(result, Ok(()));
    }
}

proptest! {
    #![proptest_config(random::cases(600))]

    #[test]
    fn the_cpu_agrees_with_dense_attention(problem in problems()) {
        for door in DOORS {
            let session = open(door, CPU);
            let tolerance = Tolerance::fast(problem.q_dtype);
            let result = check(&*session, &problem, tolerance);
            prop_assert!(result.is_ok(), "{} door: {}", door.name(), result.unwrap_err());
        }
    }
}
