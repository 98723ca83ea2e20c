//! A fuzzer of the C functions. It draws whole valid calls, corrupts one to three of their fields, lengths or
//! tensors, and makes them: on the CPU, where what is accepted is compared with the float64 oracle, and over
//! the stub driver, where the device's memory may not be touched at all. A refusal must name a field of the
//! header and leave all memory as it was.
//!
//! `FOLIO_FUZZ_SECONDS` bounds it and `FOLIO_FUZZ_SEED` picks the cases. A crash must not end the search, so
//! cases run in a worker process. One that fails is saved under `failures/`, and replayed first next time.

#![allow(unsafe_code)]

mod append_run;
mod attention;
mod cascade;
#[path = "../common/mod.rs"]
mod common;
mod context;
mod corrupt;
mod guarded;
mod handle;
mod header;
mod index;
mod mla;
mod operators;
mod oracle;
mod prefixes;
mod structs;
#[path = "../stub_driver/stub.rs"]
#[allow(dead_code)]
mod stub;

use common::c_door::{api, c_context_desc, message, report};
use corrupt::Rng;
use folio::api::Target;
use folio::ffi::*;
use folio::tensor::Device;
use oracle::{By, Ending};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Where a case runs.
pub struct Place {
    device: Device,
    backend: *mut folio_context,
    oracle: *mut folio_context,
    /// Whoever finds the worker dead reads here what it was about to do.
    current: PathBuf,
    title: std::cell::RefCell<String>,
}

impl Place {
    fn new(name: &str) -> Place {
        let (device, target) = match name {
            "cpu" => (Device::Cpu, Target::Cpu { num_threads: 2 }),
            "stub" => (Device::Cuda(0), Target::Cuda { ordinal: 0 }),
            other => panic!("{other} is no place to fuzz; cpu and stub are"),
        };
        Place {
            device,
            backend: open(target),
            oracle: open(Target::Reference),
            current: current_file(name),
            title: Default::default(),
        }
    }

    /// The context that computes.
    fn context(&self, by: By) -> *const folio_context {
        match by {
            By::Backend => self.backend,
            By::Oracle => self.oracle,
        }
    }

    /// Leaves a note of the case that is about to run.
    fn announce(&self, text: &str) {
        let note = format!("{}\n{text}", self.title.borrow());
        std::fs::write(&self.current, note).expect("the target folder is writable");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for ctx in [self.backend, self.oracle] {
            // SAFETY: made by `open`, and no handle of it is left.
            unsafe { api().context_destroy.unwrap()(ctx) };
        }
    }
}

fn open(target: Target) -> *mut folio_context {
    let (desc, mut ctx, mut err) = (c_context_desc(target), std::ptr::null_mut(), report());
    // SAFETY: live structs.
    let status = unsafe { api().context_create.unwrap()(&desc, &mut ctx, &mut err) };
    assert_eq!(status, FOLIO_OK, "{}", message(&err));
    ctx
}

fn current_file(place: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{place}.txt"))
}

/// Runs one case. `None` where its corruption would have been a lie that only the caller can answer for.
fn run_case(place: &Place, seed: u64, case: u64) -> Result<Option<Ending>, String> {
    let mut rng = Rng::of(seed, case);
    let ending = match rng.below(40) {
        0..2 => operators::append(&mut rng, place),
        2..4 => operators::copy(&mut rng, place),
        4..8 => operators::merge_state(&mut rng, place),
        8..10 => operators::merge_states(&mut rng, place),
        10..12 => operators::merge_varlen(&mut rng, place),
        12 => Ok(context::case(&mut rng, place)),
        13..18 => mla::case(&mut rng, place),
        18..22 => operators::projection(&mut rng, place),
        22..24 => operators::mla_append(&mut rng, place),
        24 => operators::mla_gather(&mut rng, place),
        25 => operators::gather(&mut rng, place),
        26..28 => operators::tree_mask(&mut rng, place),
        28..30 => index::case(&mut rng, place),
        30 => operators::rope_append(&mut rng, place),
        31..33 => cascade::case(&mut rng, place),
        38..40 => append_run::case(&mut rng, place),
        _ => attention::case(&mut rng, place),
    }?;
    if let Some(Ending::Refused(refusal)) = &ending {
        is_well_said(refusal)?;
    }
    Ok(ending)
}

/// A refusal names what it refuses.
fn is_well_said(refusal: &oracle::Refusal) -> Result<(), String> {
    thread_local! {
        static NAMES: HashSet<&'static str> = header::names();
    }
    let says_it = match refusal.status {
        FOLIO_ERR_NOT_PLANNED => true,
        // The device's kernels are no field.
        FOLIO_ERR_UNSUPPORTED | FOLIO_ERR_COMPILE => !refusal.message.is_empty(),
        FOLIO_OK | FOLIO_ERR_INTERNAL => false,
        _ => NAMES.with(|names| header::names_a_field(&refusal.message, names)),
    };
    match says_it {
        true => Ok(()),
        false => Err(format!(
            "status {:?} says: {}",
            refusal.status, refusal.message
        )),
    }
}

/// Runs cases from `first` on until the time is up. What fails ends the process.
fn work(name: &str, seed: u64, first: u64, seconds: f64) {
    let place = Place::new(name);
    let driver = (name == "stub").then(stub::Recorder::new);
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for case in first.. {
        *place.title.borrow_mut() = format!("{name} {seed} {case}");
        // The stub has room for what it is asked in one case.
        driver.iter().for_each(stub::Recorder::forget);
        match run_case(&place, seed, case) {
            Ok(None) => {}
            Ok(Some(ending)) => *counts.entry(kind(&ending)).or_default() += 1,
            Err(what) => {
                eprintln!("{what}");
                std::process::exit(1);
            }
        }
        if Instant::now() > end || seconds == 0.0 {
            break;
        }
    }
    let counts = counts.iter().map(|(kind, count)| format!("{count} {kind}"));
    println!("{name}: {}", counts.collect::<Vec<_>>().join(", "));
}

fn kind(ending: &Ending) -> String {
    match ending {
        Ending::Accepted => "accepted".into(),
        Ending::Refused(refusal) => {
            // SAFETY: any number has a name, which is static.
            let name = unsafe { std::ffi::CStr::from_ptr(folio_status_name(refusal.status)) };
            name.to_string_lossy().into_owned()
        }
    }
}

/// A worker on cases from `first` on. On failure, the case and what went wrong.
fn supervise(place: &str, seed: u64, first: u64, seconds: f64) -> Result<(), (u64, String)> {
    let _ = std::fs::remove_file(current_file(place));
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    let arguments = [seed.to_string(), first.to_string(), seconds.to_string()];
    command.arg("--worker").arg(place).args(arguments);
    if place == "stub" {
        let folder = stub::build(stub::Stub::Complete).expect("a C compiler");
        command.env("LD_LIBRARY_PATH", folder);
        let compiler = stub::build_compiler().expect("a C compiler");
        command.env("FOLIO_STUB", "ok").env("FOLIO_NVRTC", compiler);
        // What the stub compiles must not be found by anybody else.
        command.env("FOLIO_CACHE_DIR", "");
    }
    let worker = command.output().expect("this program runs");
    print!("{}", String::from_utf8_lossy(&worker.stdout));
    if worker.status.success() {
        return Ok(());
    }
    let case = std::fs::read_to_string(current_file(place)).unwrap_or_default();
    let number = case.split_whitespace().nth(2).and_then(|n| n.parse().ok());
    let text = format!(
        "{case}\n{}\n{}",
        worker.status,
        String::from_utf8_lossy(&worker.stderr)
    );
    Err((number.unwrap_or(first), text))
}

fn failures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/failures")
}

/// Cases that failed before, each by the first line of its file: place, seed and number.
fn saved() -> Vec<(String, u64, u64)> {
    let files = std::fs::read_dir(failures())
        .into_iter()
        .flatten()
        .flatten();
    let mut cases: Vec<(String, u64, u64)> = files
        .filter_map(|file| std::fs::read_to_string(file.path()).ok())
        .filter_map(|text| {
            let mut words = text.split_whitespace();
            let place = words.next()?.to_owned();
            Some((
                place,
                words.next()?.parse().ok()?,
                words.next()?.parse().ok()?,
            ))
        })
        .collect();
    cases.sort();
    cases
}

fn save(place: &str, seed: u64, case: u64, text: &str) {
    let file = failures().join(format!("{place}-{seed}-{case}.txt"));
    println!("fuzz: FAILED, saved as {}\n{text}", file.display());
    std::fs::create_dir_all(failures()).expect("the tests' folder is writable");
    std::fs::write(file, text).expect("the tests' folder is writable");
}

/// Failures after which a run gives up.
const MOST_FAILURES: usize = 5;

fn setting(name: &str, default: f64) -> f64 {
    let stated = std::env::var(name).ok().filter(|value| !value.is_empty());
    stated.map_or(default, |value| {
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name}: {value} is no number"))
    })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, place, seed, first, seconds] = arguments.as_slice()
        && flag == "--worker"
    {
        let number = |text: &String| text.parse().expect("a number");
        work(
            place,
            number(seed),
            number(first),
            seconds.parse().expect("a number"),
        );
        return ExitCode::SUCCESS;
    }
    let seconds = setting("FOLIO_FUZZ_SECONDS", 5.0);
    let seed = setting("FOLIO_FUZZ_SEED", 1.0) as u64;
    let mut failed = 0;
    for (place, seed, case) in saved() {
        if let Err((case, text)) = supervise(&place, seed, case, 0.0) {
            failed += 1;
            save(&place, seed, case, &text);
        }
    }
    for (place, share) in [("cpu", 0.75), ("stub", 0.25)] {
        let end = Instant::now() + Duration::from_secs_f64(seconds * share);
        let mut first = 0;
        while failed < MOST_FAILURES && Instant::now() < end {
            let left = end.duration_since(Instant::now()).as_secs_f64();
            match supervise(place, seed, first, left) {
                Ok(()) => break,
                Err((case, text)) => {
                    failed += 1;
                    save(place, seed, case, &text);
                    first = case + 1;
                }
            }
        }
    }
    println!("fuzz: {seconds} seconds with seed {seed}: {failed} failed");
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
