//! Compilations through the cache: one at create, or all of them before any device is there, which is
//! what `build.rs` does for the bundle and `examples/kernels.rs` for its report.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::cubin_cache::CubinCache;
use super::nvrtc::{Compiled, Nvrtc};
use super::unit::{Sources, Unit};
use crate::cuda::kernels::Row;
use crate::error::Result;

/// Where a wheel of the compiler may be unpacked, relative to the project.
pub const NVRTC_FOLDER: &str = ".tools/nvrtc";

/// The compilations of some rows for the targets of the bundle, each once.
pub fn units<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<Unit> {
    let mut units = Vec::new();
    for row in rows {
        for target in row.arch.bundle_targets() {
            let unit = Unit::new(row, target);
            if !units.contains(&unit) {
                units.push(unit);
            }
        }
    }
    units
}

/// Reads the files of `kernels/` and its folders.
pub fn read_sources(folder: &Path) -> std::io::Result<Sources> {
    let mut files = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(current) = open.pop() {
        for entry in std::fs::read_dir(current)? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path
                .extension()
                .is_some_and(|e| e == "cu" || e == "cuh" || e == "h")
            {
                let name = path.strip_prefix(folder).unwrap_or(&path).to_string_lossy();
                files.push((name.into_owned(), std::fs::read_to_string(&path)?));
            }
        }
    }
    Ok(Sources::new(files))
}

/// The cache of a build: `FOLIO_CACHE_DIR` where it is set, which several checkouts may share, else a
/// folder of Cargo's target folder, found upwards from any path in it, so that it survives changes of
/// profile and of Rust code.
pub fn build_cache(inside: &Path) -> CubinCache {
    CubinCache::named().unwrap_or_else(|| {
        let is_target = |folder: &&Path| folder.join("CACHEDIR.TAG").exists();
        let folder = inside.ancestors().find(is_target).unwrap_or(inside);
        CubinCache::new(folder.join("folio-kernels"))
    })
}

/// Compiles all units on `threads` threads; results in the order of `units`.
pub fn compile_all(
    units: &[Unit],
    sources: &Sources,
    nvrtc: &Nvrtc,
    cache: &CubinCache,
    threads: usize,
) -> Vec<Result<Compiled>> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<Result<Compiled>>>> = Mutex::new(vec![None; units.len()]);
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, units.len().max(1)) {
            scope.spawn(|| {
                while let Some((index, unit)) = take(&next, units) {
                    let result = compile(unit, sources, nvrtc, Some(cache));
                    results.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(result);
                }
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_iter().flatten().collect()
}

fn take<'a>(next: &AtomicUsize, units: &'a [Unit]) -> Option<(usize, &'a Unit)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    Some((index, units.get(index)?))
}

/// One result, out of the cache where it is there, and into it where it was not.
///
/// # Errors
/// [`crate::error::Error::Compile`]. Never because of the cache: one that cannot be written costs the
/// next process a compilation, and this one nothing.
pub fn compile(
    unit: &Unit,
    sources: &Sources,
    nvrtc: &Nvrtc,
    cache: Option<&CubinCache>,
) -> Result<Compiled> {
    let closure = sources.closure(&unit.source)?;
    let hash = unit.hash(&closure, nvrtc.version());
    if let Some(compiled) = cache.and_then(|cache| cache.get(hash)) {
        return Ok(compiled);
    }
    let compiled = nvrtc.compile(unit, &closure)?;
    if let Some(cache) = cache {
        let _ = cache.put(hash, &compiled);
    }
    Ok(compiled)
}
