//! Test cases that run in processes of their own and may say that they were skipped. (The standard
//! harness runs cases as threads of one process and knows no skipping at run time.) It is the `main` of
//! test targets with `harness = false`, and prints what the standard one prints.

pub mod skips;

use std::process::{Command, ExitCode};

/// One process.
pub struct Case<S> {
    /// What is tested.
    pub name: &'static str,
    /// What the process needs; `main`'s `prepare` knows how to provide it.
    pub setup: S,
    /// The test, in that process. It fails by panicking.
    pub run: fn(),
}

/// A case.
pub const fn case<S>(name: &'static str, setup: S, run: fn()) -> Case<S> {
    Case { name, setup, run }
}

/// What a case prints when it could not test anything.
const SKIPPED: &str = "skipped: ";

/// Ends the process of a case that finds out that it cannot run here.
pub fn skip(reason: &str) -> ! {
    println!("{SKIPPED}{reason}");
    std::process::exit(0);
}

enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// Runs the cases whose names contain one of the arguments, or all; with `--list` it prints their names. `prepare` sets
/// a process up, or says why its case cannot run here.
pub fn main<S>(cases: &[Case<S>], prepare: fn(&S, &mut Command) -> Result<(), String>) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name] = arguments.as_slice()
        && flag == "--case"
    {
        let case = cases.iter().find(|case| case.name == name);
        (case.expect("a case of that name").run)();
        return ExitCode::SUCCESS;
    }
    let parts: Vec<&String> = arguments
        .iter()
        .filter(|part| !part.starts_with('-'))
        .collect();
    let wanted = |name: &str| parts.is_empty() || parts.iter().any(|part| name.contains(*part));
    let wanted = cases.iter().filter(|case| wanted(case.name));
    if arguments.iter().any(|argument| argument == "--list") {
        wanted.for_each(|case| println!("{}: test", case.name));
        return ExitCode::SUCCESS;
    }
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for case in wanted {
        let (count, text) = match run(case, prepare) {
            Outcome::Passed => (&mut passed, "ok".into()),
            Outcome::Skipped(reason) => {
                let test = concat!("test ", env!("CARGO_CRATE_NAME"), "::");
                skips::note(&format!("{test}{}", case.name), &reason);
                (&mut skipped, format!("{SKIPPED}{reason}"))
            }
            Outcome::Failed(output) => (&mut failed, format!("FAILED\n{output}")),
        };
        *count += 1;
        println!("test {} ... {text}", case.name);
    }
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!("\ntest result: {result}. {passed} passed; {failed} failed; {skipped} skipped\n");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn run<S>(case: &Case<S>, prepare: fn(&S, &mut Command) -> Result<(), String>) -> Outcome {
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args(["--case", case.name]);
    if let Err(reason) = prepare(&case.setup, &mut command) {
        return Outcome::Skipped(reason);
    }
    let child = command.output().expect("this program runs");
    let output = String::from_utf8_lossy(&[child.stdout, child.stderr].concat()).into_owned();
    if !child.status.success() {
        return Outcome::Failed(format!("{}\n{output}", child.status));
    }
    match output.lines().find_map(|line| line.strip_prefix(SKIPPED)) {
        Some(reason) => Outcome::Skipped(reason.into()),
        None => Outcome::Passed,
    }
}
