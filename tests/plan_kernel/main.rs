//! The planning kernel, `kernels/plan/plan.cu`, without a GPU: compiled as C++, a thread block of fibers plans random batches, and
//! `main.cpp` checks what comes of each. That plans of the device and of the host are right for attention is `tests/cuda`'s.

#[path = "../harness/mod.rs"]
mod harness;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use harness::case;

/// Batches of a kind. A thousand threads that take turns plan one in 10 to 40 ms.
const BATCHES: u32 = 150;

fn main() -> ExitCode {
    let cases = [
        case("any_batch", (), any_batch),
        case("few_rounds", (), few_rounds),
        case("few_tiles", (), few_tiles),
        case("shares", (), shares),
        case("invariant", (), invariant),
    ];
    harness::main(&cases, |_, _| Ok(()))
}

/// Decodes and prompts of any lengths.
fn any_batch() {
    planned("any").has("split");
}

/// Prompts of one to three rounds of tiles on many keys.
fn few_rounds() {
    planned("few_rounds").has("with a tail");
}

fn few_tiles() {
    planned("few_tiles").has("with narrow tiles");
}

fn shares() {
    planned("shares").has("in shares");
}

fn invariant() {
    planned("invariant").has("split");
}

/// What the program says that it planned.
struct Planned(String);

impl Planned {
    /// Some of the batches had what the case is for.
    fn has(self, what: &str) {
        let count = self.0.split(&[':', ','][..]).find_map(|part| {
            let count = part.trim().strip_suffix(what)?;
            count.trim().parse::<u32>().ok()
        });
        assert!(count > Some(0), "{what}: {}", self.0);
    }
}

fn planned(kind: &str) -> Planned {
    let seed = std::env::var("PROPTEST_RNG_SEED").unwrap_or_else(|_| "1".into());
    let run = Command::new(program(kind))
        .args([kind, &seed, &BATCHES.to_string()])
        .output()
        .expect("the compiled program starts");
    let told = String::from_utf8_lossy(&run.stdout);
    let last = told.lines().last().unwrap_or_default().to_owned();
    assert!(run.status.success(), "{last}: {}", run.status);
    Planned(last)
}

/// Compiles the kernel and what runs it. CUDA's keywords become C++'s; `cuda/` has its built-ins.
fn program(case: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let here = root.join("tests/plan_kernel");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("plan_kernel_{case}"));
    let status = Command::new("c++")
        .args(["-std=c++17", "-O1", "-w", "-fno-threadsafe-statics"])
        .args([
            "-D__device__=",
            "-D__global__=",
            "-D__grid_constant__=",
            "-D__shared__=static",
        ])
        .args([
            "-D__forceinline__=inline",
            "-D__launch_bounds__(...)=",
            "-DFOLIO_THREADS=1024",
        ])
        .arg("-I")
        .arg(here.join("cuda"))
        .arg("-I")
        .arg(&here)
        .arg("-I")
        .arg(root.join("kernels"))
        .args(["main.cpp", "batch.cpp", "thread_block.cpp"].map(|file| here.join(file)))
        .arg("-o")
        .arg(&program)
        .status();
    match status {
        Err(error) => harness::skip(&format!("no C++ compiler: c++: {error}")),
        Ok(status) => assert!(status.success(), "the planning kernel compiles as C++"),
    }
    program
}
