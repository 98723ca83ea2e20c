//! Compiles every row of the kernel table, on any machine that has NVRTC, and reports what the assembler
//! says about each kernel. Fails where one does not compile, spills, needs more shared memory than its
//! target has, or loses performance by ptxas's own account (a serialised wgmma). Unchanged kernels come
//! out of the build's cache, with the time that they once took.
//!
//!     cargo run --example kernels [part of a row's name ...]

mod ptxas;
#[path = "../../tests/harness/skips.rs"]
#[allow(dead_code)]
mod skips;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use folio::cuda::compiler::compile;
use folio::cuda::compiler::nvrtc::{Compiled, Nvrtc};
use folio::cuda::compiler::unit::Unit;
use folio::cuda::compiler::workers;
use folio::cuda::kernels::{self, Row};

/// The exit status of a run that could not test anything (as automake and CTest have it).
const SKIPPED: u8 = 77;

fn main() -> ExitCode {
    workers::serve_if_worker();
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    match Nvrtc::find(&[project.join(compile::NVRTC_FOLDER)]) {
        Err(reason) => {
            eprintln!("skipped: {reason}");
            skips::note("GPU kernels", &reason.to_string());
            ExitCode::from(SKIPPED)
        }
        Ok(nvrtc) => match report(&nvrtc, project) {
            Ok(0) => ExitCode::SUCCESS,
            Ok(faults) => {
                eprintln!("{faults} kernel(s) with faults");
                ExitCode::FAILURE
            }
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        },
    }
}

/// Prints the table and answers the number of kernels with faults.
fn report(nvrtc: &Nvrtc, project: &Path) -> Result<usize, Box<dyn Error>> {
    let parts: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |row: &&Row| parts.is_empty() || parts.iter().any(|part| row.name.contains(part));
    let rows: Vec<&Row> = kernels::table().filter(wanted).collect();
    let units = compile::units(rows.iter().copied());
    let sources = compile::read_sources(&project.join("kernels"))?;
    let cache = compile::build_cache(&std::env::current_exe()?);
    let results = workers::compile_all(&units, &sources, nvrtc, &cache, workers::jobs());

    println!(
        "{nvrtc:?}: {} rows, {} images of {} compilations",
        rows.len(),
        units.len(),
        compile::runs(&units).count()
    );
    println!(
        "{:<44} {:>10} {:>5} {:>8} {:>8} {:>6} {:>6} {:>9} {:>9} {:>7}",
        "row", "target", "regs", "static", "dynamic", "spills", "stack", "image", "packed", "ms"
    );
    let mut faults = 0;
    for row in rows {
        for target in row.arch.bundle_targets() {
            let unit = Unit::new(row, target);
            let index = units
                .iter()
                .position(|other| *other == unit)
                .expect("its unit");
            if let Err(fault) = print_kernel(row, &unit, &results[index]) {
                faults += 1;
                println!("  ^ {fault}");
            }
        }
    }
    print_total(&results);
    Ok(faults)
}

fn print_kernel(
    row: &Row,
    unit: &Unit,
    result: &folio::error::Result<Compiled>,
) -> Result<(), Box<dyn Error>> {
    print!("{:<44} {:>10} ", row.name, unit.target);
    let compiled = result
        .as_ref()
        .inspect_err(|_| println!())
        .map_err(Clone::clone)?;
    let sizes = format!(
        "{:>9} {:>9} {:>7}",
        compiled.image.unpack()?.len(),
        compiled.image.bytes().len(),
        compiled.millis
    );
    if unit.is_ptx() {
        // Registers and spills are the driver's choice, made on the device.
        println!("{:>37} {sizes}", "");
        return Ok(());
    }
    let kernel = ptxas::parse(&compiled.log, row.symbol).inspect_err(|_| println!())?;
    println!(
        "{:>5} {:>8} {:>8} {:>6} {:>6} {sizes}",
        kernel.registers, kernel.static_shared, row.shared_bytes, kernel.spills, kernel.stack,
    );
    if kernel.spills > 0 {
        return Err(format!("spills {} bytes", kernel.spills).into());
    }
    let (shared, most) = (
        kernel.static_shared + row.shared_bytes,
        shared_limit(&unit.target),
    );
    if shared > most {
        return Err(format!("needs {shared} bytes of shared memory; a block has {most}").into());
    }
    match ptxas::lost_performance(&compiled.log) {
        Some(line) => Err(line.into()),
        None => Ok(()),
    }
}

/// Most shared memory of a block by compute capability, static and dynamic (CUDA programming guide, table
/// of technical specifications): 163 KiB on 8.0 (99 KiB on 8.6 and 8.9, where the driver layer refuses
/// larger kernels), 227 KiB on 9.0.
fn shared_limit(target: &str) -> u32 {
    match target {
        "sm_80" => 163 * 1024,
        _ => 227 * 1024,
    }
}

fn print_total(results: &[folio::error::Result<Compiled>]) {
    let compiled: Vec<&Compiled> = results.iter().flatten().collect();
    let images = compiled.iter().map(|compiled| &compiled.image);
    let packed: usize = images.clone().map(|image| image.bytes().len()).sum();
    let images: usize = images
        .map(|image| image.unpack().map_or(0, |bytes| bytes.len()))
        .sum();
    let millis: u64 = compiled
        .iter()
        .map(|compiled| u64::from(compiled.millis))
        .sum();
    println!(
        "{} images, {images} bytes, {packed} packed, {:.1} s of compilation",
        compiled.len(),
        millis as f64 / 1000.0
    );
}
