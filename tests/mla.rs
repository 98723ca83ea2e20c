//! Absorbed multi-head latent attention against float64, through both doors.

mod common;

use common::compare::{Tolerance, compare};
use common::door::{DOORS, Session};
use common::mla::{self, MlaProblem, problems, solve_on_host};
use common::random;
use folio::api::Target;
use proptest::prelude::*;

fn sessions(target: Target) -> impl Iterator<Item = Box<dyn Session>> {
    DOORS.iter().map(move |door| door.open(target).unwrap())
}

/// The oracle, which other tests may trust then.
fn check_oracle(problem: &MlaProblem) -> Result<(), String> {
    let want = mla::attention(problem);
    for session in sessions(Target::Reference) {
        let got = solve_on_host(&*session, problem).map_err(|error| error.to_string())?;
        compare(&problem.batch, &want, &got, Tolerance::oracle())?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(random::cases(60))]

    #[test]
    fn the_oracle_is_right(problem in problems()) {
        check_oracle(&problem).map_err(TestCaseError::fail)?;
    }
}
