//! The driver layer against a CUDA driver that computes nothing (`stub.c`), built here with `cc`. The
//! driver is opened once per process, so every case runs in a process of its own: this program again,
//! with the stub first on the loader's path.
#![allow(unsafe_code)]

mod cases;
mod stub;

use std::process::{Command, ExitCode};

use cases::CASES;

/// How a case ended.
enum Outcome {
    Passed,
    Skipped(String),
    Failed(String),
}

/// What a child prints before it leaves without having tested anything.
const SKIPPED: &str = "skipped: ";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name] = arguments.as_slice()
        && flag == "--case"
    {
        let case = CASES
            .iter()
            .find(|case| case.name == name)
            .expect("a case of that name");
        (case.run)();
        return ExitCode::SUCCESS;
    }
    let filter: Vec<&String> = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'))
        .collect();
    let wanted = |name: &str| filter.is_empty() || filter.iter().any(|part| name.contains(*part));
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for case in CASES.iter().filter(|case| wanted(case.name)) {
        match run(case) {
            Outcome::Passed => {
                passed += 1;
                println!("test {} ... ok", case.name);
            }
            Outcome::Skipped(reason) => {
                skipped += 1;
                println!("test {} ... skipped: {reason}", case.name);
            }
            Outcome::Failed(output) => {
                failed += 1;
                println!("test {} ... FAILED\n{output}", case.name);
            }
        }
    }
    println!("test result: {passed} passed; {failed} failed; {skipped} skipped");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn run(case: &cases::Case) -> Outcome {
    let folder = match stub::build(case.stub) {
        Ok(folder) => folder,
        Err(stub::NoCompiler(reason)) => return Outcome::Skipped(reason),
    };
    let this = std::env::current_exe().expect("the path of this program");
    let child = Command::new(this)
        .args(["--case", case.name])
        .env("LD_LIBRARY_PATH", &folder)
        .env("FOLIO_STUB", case.mode)
        .env("FOLIO_NVRTC", "")
        .env_remove("RUST_BACKTRACE")
        .output()
        .expect("this program runs");
    let output = String::from_utf8_lossy(&[child.stdout, child.stderr].concat()).into_owned();
    if !child.status.success() {
        return Outcome::Failed(format!("{}\n{output}", child.status));
    }
    match output.lines().find_map(|line| line.strip_prefix(SKIPPED)) {
        Some(reason) => Outcome::Skipped(reason.into()),
        None => Outcome::Passed,
    }
}
