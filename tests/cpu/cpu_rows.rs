//! Every instruction set of this machine against dense attention; `tests/cpu/attention.rs` sees only the
//! best one, or the one that `FOLIO_TEST_ISA` names.

use crate::common::compare::{Tolerance, compare};
use crate::common::dense;
use crate::common::door::{self, Session};
use crate::common::instance::solve;
use crate::common::memory::HostMemory;
use crate::common::problem::Problem;
use crate::common::random;
use crate::common::strategy::problems;
use folio::api::{Attention, Context, Target};
use folio::cpu::{CpuBackend, Isa};
use folio::log::Logger;
use proptest::prelude::*;

fn sessions() -> Vec<(Isa, Box<dyn Session>)> {
    let available = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    let session = |isa| -> Box<dyn Session> {
        let backend = CpuBackend::with_isa(2, isa).expect("an available instruction set");
        Box::new(Context::with_backend(Box::new(backend), Logger::silent()))
    };
    available.map(|isa| (isa, session(isa))).collect()
}

/// With `FOLIO_TEST_ISA` the suites run on that instruction set and on no better one.
#[test]
fn the_door_opens_the_chosen_row() {
    let target = Target::Cpu { num_threads: 1 };
    let kernel = |context: folio::error::Result<Context>| {
        let context = context.expect("a CPU context");
        let desc = Problem::plain(&[(1, 8)]).desc();
        let attention = Attention::new(&context, desc).expect("a handle");
        attention.kernel().to_owned()
    };
    let found = kernel(door::context(target));
    match door::chosen_isa() {
        Some(isa) => assert_eq!(found, isa.name()),
        None => assert_eq!(found, kernel(Context::new(target, Logger::silent()))),
    }
}

proptest! {
    #![proptest_config(random::cases(300))]

    #[test]
    fn every_row_agrees_with_dense_attention(problem in problems()) {
        let want = dense::attention(&problem);
        for (isa, session) in sessions() {
            let got = solve(&*session, &HostMemory, &problem);
            prop_assert!(got.is_ok(), "{isa:?}: {:?}", got.err());
            let tolerance = Tolerance::fast(problem.q_dtype);
            let result = compare(&problem, &want, &got.unwrap(), tolerance);
            prop_assert!(result.is_ok(), "{isa:?}: {}", result.unwrap_err());
        }
    }
}
