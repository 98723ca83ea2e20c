//! The CPU benchmark: first what this machine can do (read bandwidth, copies, FMA and AMX rates), then
//! decode, prefill, append and plan as ratios to it. Prints a table; writes JSON lines and a roofline
//! picture under `target/bench`.
//!
//! `cargo bench --bench cpu -- [--quick] [--threads N] [--rounds N] [--only NAME]`
//!
//! Limits and workloads are measured in alternation and the best round of each counts, so that noise of
//! the machine hits both alike. Nothing here is a test: a slow machine fails nothing.

mod cases;
mod data;
mod limits;
mod report;
mod torch;

use cases::Case;
use limits::Limits;
use std::time::{Duration, Instant};

/// What the command line says; the opening comment lists it.
#[allow(missing_docs)]
pub struct Options {
    pub quick: bool,
    pub threads: usize,
    pub rounds: usize,
    pub only: Option<String>,
}

fn main() {
    let options = options();
    println!(
        "folio CPU benchmark: {} threads, {} rounds, {}",
        options.threads,
        options.rounds,
        folio::cpu::Isa::best().name()
    );
    let mut limits = Limits::new(options.threads);
    limits.measure();
    let mut results = Vec::new();
    for case in cases::all(&options) {
        eprint!("  {:<44}\r", case.name());
        let mut prepared = case.prepare(options.threads);
        let mut best = Duration::MAX;
        for _ in 0..options.rounds {
            best = best.min(prepared.round());
            limits.refresh(case.limit());
        }
        results.push((case, best));
    }
    let peers = torch::measure(&results, &options);
    report::print(&limits, &results, &peers);
    report::write(&limits, &results, &peers).expect("target/bench is writable");
}

/// Time of one call.
pub fn timed(call: impl FnOnce()) -> Duration {
    let start = Instant::now();
    call();
    start.elapsed()
}

fn options() -> Options {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| {
        let at = args.iter().position(|arg| arg == name)?;
        args.get(at + 1).cloned()
    };
    let quick = args.iter().any(|arg| arg == "--quick");
    let number =
        |name: &str, default: usize| value(name).map_or(default, |text| text.parse().expect(name));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Options {
        quick,
        threads: number("--threads", cores),
        rounds: number("--rounds", if quick { 5 } else { 15 }),
        only: value("--only"),
    }
}

/// What a case is measured against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Bytes per second of sequential reads.
    Read,
    /// Bytes per second of a plain copy of as many bytes.
    Copy,
    /// Operations per second of fp32 FMA.
    Fma,
    /// Operations per second of AMX bf16 products from first-level cache; FMA where there is none.
    Matrix,
    /// A time in microseconds.
    Time,
}

impl Case {
    /// The measured limit's unit and the case's own rate in it.
    pub fn rate(&self, best: Duration) -> f64 {
        match self.limit() {
            Limit::Read | Limit::Copy => self.bytes() / best.as_secs_f64(),
            Limit::Fma | Limit::Matrix => self.operations() / best.as_secs_f64(),
            Limit::Time => best.as_secs_f64() * 1e6,
        }
    }
}
