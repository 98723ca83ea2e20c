//! Compilations by processes side by side, with a compiler that only says which process it runs in
//! (`stub_nvrtc.c`, built here with `cc`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use folio::cuda::compiler::cubin_cache::CubinCache;
use folio::cuda::compiler::nvrtc::{Compiled, Nvrtc};
use folio::cuda::compiler::unit::{Sources, Unit};
use folio::cuda::compiler::workers::compile_all;
use folio::error::{Error, Result};

use crate::harness;

/// An empty folder of a case.
fn folder(case: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("workers")
        .join(case);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// The stub, and the folder that its processes leave files in.
fn stub(folder: &Path) -> (Nvrtc, PathBuf) {
    let library = folder.join("libnvrtc.so.13");
    let status = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared"])
        .args(["-fPIC", "-fvisibility=hidden", "-o"])
        .arg(&library)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/compile/stub_nvrtc.c"))
        .status();
    match status {
        Err(error) => harness::skip(&format!("no C compiler: cc: {error}")),
        Ok(status) => assert!(status.success(), "stub_nvrtc.c compiles"),
    }
    let processes = folder.join("processes");
    std::fs::create_dir_all(&processes).unwrap();
    // SAFETY: this process has one thread.
    unsafe { std::env::set_var("FOLIO_STUB_FOLDER", &processes) };
    (Nvrtc::named(&library).unwrap(), processes)
}

/// A source for each text, called by its number, and a unit for each source.
fn units(texts: &[&str]) -> (Sources, Vec<Unit>) {
    let name = |at: usize| format!("{at}.cu");
    let files = (texts.iter().enumerate()).map(|(at, text)| (name(at), (*text).to_owned()));
    let unit = |at| Unit {
        source: name(at),
        defines: vec!["A=1".into(), "B".into()],
        target: "sm_80".into(),
    };
    let header = ("h.cuh".to_owned(), String::new());
    (
        Sources::new(files.chain([header])),
        (0..texts.len()).map(unit).collect(),
    )
}

/// The image of a result, which a stub wrote as text.
fn text(result: &Result<Compiled>) -> String {
    let image = result.as_ref().unwrap().image.unpack().unwrap();
    String::from_utf8(image).unwrap()
}

/// The process that made a result.
fn process(result: &Result<Compiled>) -> u32 {
    let number = text(result);
    let number = number.strip_prefix("process ").unwrap().split(',').next();
    number.unwrap().parse().unwrap()
}

fn processes(results: &[Result<Compiled>]) -> BTreeSet<u32> {
    results.iter().map(process).collect()
}

pub fn as_many_processes_as_jobs() {
    let folder = folder("jobs");
    let (nvrtc, _) = stub(&folder);
    let (sources, units) = units(&["// MEET 3"; 12]);
    let results = compile_all(
        &units,
        &sources,
        &nvrtc,
        &CubinCache::new(folder.join("3")),
        3,
    );
    let seen = processes(&results);
    assert_eq!(seen.len(), 3, "{results:?}");
    assert!(!seen.contains(&std::process::id()));
}

pub fn one_job_is_one_process() {
    let folder = folder("one_job");
    let (nvrtc, left) = stub(&folder);
    let (sources, units) = units(&["#include \"h.cuh\"\n// MEET 1"; 4]);
    let cache = CubinCache::new(folder.join("cache"));
    let results = compile_all(&units, &sources, &nvrtc, &cache, 1);
    assert_eq!(processes(&results).len(), 1);
    for (at, result) in results.iter().enumerate() {
        // Target, standard, ptxas and two macros.
        let told = format!(", {at}.cu, 1 headers, 5 options\0");
        assert!(text(result).ends_with(&told));
    }

    std::fs::remove_dir_all(&left).unwrap();
    let again = compile_all(&units, &sources, &nvrtc, &cache, 4);
    assert_eq!(again, results, "out of the cache, and no process compiled");
    assert!(!left.exists());
}

/// A cubin and the PTX that it is assembled from are of one run, and both are in the cache afterwards. PTX of other defines is of
/// its own.
pub fn ptx_comes_with_its_cubin() {
    let folder = folder("ptx");
    let (nvrtc, left) = stub(&folder);
    let (sources, units) = units(&["// MEET 1"]);
    let cubin = &units[0];
    let ptx = Unit {
        target: "compute_80".into(),
        ..cubin.clone()
    };
    let other = Unit {
        defines: vec!["A=2".into()],
        ..ptx.clone()
    };
    let units = [cubin.clone(), ptx, other];
    let cache = CubinCache::new(folder.join("cache"));
    let results = compile_all(&units, &sources, &nvrtc, &cache, 1);
    let [cubin, ptx, other] = &results[..] else {
        panic!("{results:?}");
    };
    assert_eq!(text(ptx), format!("PTX {}", text(cubin)));
    assert!(text(cubin).ends_with(", 5 options\0"), "{cubin:?}");
    assert!(text(other).starts_with("PTX ") && text(other).ends_with(", 4 options\0"));

    std::fs::remove_dir_all(&left).unwrap();
    let again = compile_all(&units, &sources, &nvrtc, &cache, 1);
    assert_eq!(again, results, "out of the cache, and no process compiled");
    assert!(!left.exists());
}

/// What fails is told where it belongs, in the compiler's words, and disturbs no other unit.
pub fn failures_keep_their_place() {
    let folder = folder("failures");
    let (nvrtc, _) = stub(&folder);
    let (sources, units) = units(&["", "WRONG", "", "CRASH", "", "#include \"none.cuh\"", ""]);
    for jobs in [1, 3] {
        let cache = CubinCache::new(folder.join(jobs.to_string()));
        let results = compile_all(&units, &sources, &nvrtc, &cache, jobs);
        assert_eq!(results.len(), units.len());
        for (at, part) in [(1, "stub: wrong"), (3, "ended"), (5, "none.cuh")] {
            let Err(Error::Compile(message)) = &results[at] else {
                panic!("{at}: {:?}", results[at]);
            };
            for part in [part, &format!("{at}.cu")] {
                assert!(message.contains(part), "{part}: {message}");
            }
        }
        for at in [0, 2, 4, 6] {
            let image = text(&results[at]);
            assert!(image.contains(&format!(", {at}.cu,")), "{at}: {image}");
        }
    }
}
