//! What there is to compile before any device is there, and one run of the compiler through the cache. (`workers.rs`
//! compiles many at a time.)

use std::path::Path;

use super::cubin_cache::CubinCache;
use super::nvrtc::{Compiled, Nvrtc};
use super::unit::{Closure, Sources, Unit};
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

/// The units that one run of the compiler makes, in the order of all: a cubin, and the PTX that stands behind it.
pub fn runs(units: &[Unit]) -> impl Iterator<Item = &[Unit]> {
    units.chunk_by(|unit, next| next.is_ptx_of(unit))
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
/// profile, of target and of Rust code.
pub fn build_cache(inside: &Path) -> CubinCache {
    CubinCache::named().unwrap_or_else(|| {
        // With --target there is one more such folder in the other.
        let is_target = |folder: &&Path| folder.join("CACHEDIR.TAG").exists();
        let above = inside.ancestors().skip_while(|folder| !is_target(folder));
        let folder = above.take_while(is_target).last().unwrap_or(inside);
        CubinCache::new(folder.join("folio-kernels"))
    })
}

/// One result, out of the cache where it is there, else compiled in this process and put into the cache.
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
    let run = std::slice::from_ref(unit);
    let compile = |closure: &Closure<'_>| nvrtc.compile(unit, &[], closure);
    let mut results = through_cache(run, sources, nvrtc.version(), cache, compile)?;
    Ok(results.remove(0))
}

/// The results of one run by any compiler of a version, which is called where the cache lacks one of them.
pub fn through_cache(
    run: &[Unit],
    sources: &Sources,
    version: u32,
    cache: Option<&CubinCache>,
    compile: impl FnOnce(&Closure<'_>) -> Result<Vec<Compiled>>,
) -> Result<Vec<Compiled>> {
    let closure = sources.closure(&run[0].source)?;
    let hashes: Vec<u128> = (run.iter())
        .map(|unit| unit.hash(&closure, version))
        .collect();
    let cached = cache.and_then(|cache| hashes.iter().map(|&hash| cache.get(hash)).collect());
    if let Some(results) = cached {
        return Ok(results);
    }
    let results = compile(&closure)?;
    if let Some(cache) = cache {
        for (&hash, compiled) in hashes.iter().zip(&results) {
            let _ = cache.put(hash, compiled);
        }
    }
    Ok(results)
}
