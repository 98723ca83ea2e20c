//! The driver layer and the backend above it against a CUDA driver that computes nothing (`stub.c`), with
//! kernels of a compiler that compiles nothing (`nvrtc.c`), both built here with `cc`. The driver is opened
//! once per process, so every case has a process, with the stub first on the loader's path.
#![allow(unsafe_code)]

mod backend;
mod biases;
mod cascade;
mod cases;
mod choice;
mod context_parallel;
mod copy;
mod cuts;
mod extend;
mod few_keys;
mod fixture;
mod formats;
mod gather;
#[path = "../harness/mod.rs"]
mod harness;
mod head_dims;
mod images;
mod index;
mod items;
mod launches;
mod lse;
mod merge;
mod mixed;
mod mla;
mod mla_cache;
mod mla_context;
mod mla_few;
mod narrow;
mod new_tokens;
mod operators;
mod prefill_rows;
mod prefill_widened;
mod projections;
mod rope_append;
mod scales;
mod split_keys;
mod stub;
mod tree_mask;

use std::process::{Command, ExitCode};

use cases::Compiler;

fn main() -> ExitCode {
    harness::main(cases::CASES, prepare)
}

fn prepare(setup: &cases::Setup, command: &mut Command) -> Result<(), String> {
    command
        .env("LD_LIBRARY_PATH", stub::build(setup.stub)?)
        .env("FOLIO_STUB", setup.mode)
        // What the stub compiles must not be found by anybody else.
        .env("FOLIO_CACHE_DIR", "");
    if !setup.kernels_of.is_empty() {
        command.env("FOLIO_COMPUTE_CAPABILITY", setup.kernels_of);
    }
    match setup.compiler {
        Compiler::Absent => command.env("FOLIO_NVRTC", ""),
        Compiler::Stub => command.env("FOLIO_NVRTC", stub::build_compiler()?),
    };
    Ok(())
}
