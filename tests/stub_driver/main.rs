//! The driver layer against a CUDA driver that computes nothing (`stub.c`), built here with `cc`. The
//! driver is opened once per process, so every case has a process, with the stub first on the loader's
//! path.
#![allow(unsafe_code)]

mod backend;
mod cases;
#[path = "../harness/mod.rs"]
mod harness;
mod images;
mod stub;

use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    harness::main(cases::CASES, prepare)
}

fn prepare(setup: &cases::Setup, command: &mut Command) -> Result<(), String> {
    command
        .env("LD_LIBRARY_PATH", stub::build(setup.stub)?)
        .env("FOLIO_STUB", setup.mode)
        .env("FOLIO_NVRTC", "");
    Ok(())
}
