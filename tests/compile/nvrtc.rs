//! Compilation by NVRTC, which needs no GPU, and the bundle that the build made with it. Skipped where
//! NVRTC is not installed, or was not when the library was built.

use std::path::{Path, PathBuf};

use folio::cuda::compiler::compile;
use folio::cuda::compiler::cubin_cache::CubinCache;
use folio::cuda::compiler::loader;
use folio::cuda::compiler::nvrtc::{Compiled, Nvrtc};
use folio::cuda::compiler::unit::{Sources, Unit};
use folio::cuda::compiler::workers;
use folio::cuda::kernels;
use folio::error::Error;

use crate::harness;

fn nvrtc() -> Nvrtc {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(compile::NVRTC_FOLDER);
    Nvrtc::find(&[folder]).unwrap_or_else(|reason| harness::skip(&reason.to_string()))
}

fn sources() -> Sources {
    let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    Sources::new([
        file(
            "double.cu",
            "#include \"common/factor.cuh\"\n\
             extern \"C\" __global__ void twice(float *x) { x[threadIdx.x] *= FACTOR + ZERO; }\n",
        ),
        file("common/factor.cuh", "#define FACTOR 2.0f\n"),
        file(
            "wrong.cu",
            "extern \"C\" __global__ void wrong() { undeclared(); }\n",
        ),
    ])
}

fn unit(source: &str, target: &str) -> Unit {
    Unit {
        source: source.into(),
        defines: vec!["ZERO=0.0f".into()],
        target: target.into(),
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("nvrtc")
        .join(name);
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn holds(bytes: &[u8], text: &str) -> bool {
    bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes())
}

fn image(compiled: &Compiled) -> Vec<u8> {
    compiled.image.unpack().unwrap()
}

fn is_cubin(image: &[u8], symbol: &str) -> bool {
    image.starts_with(b"\x7fELF") && holds(image, symbol)
}

/// As text that ends with a zero, for compute capability 8.0 and up.
fn is_ptx(image: &[u8], symbol: &str) -> bool {
    let entry = format!(".entry {symbol}(");
    image.ends_with(b"\0") && holds(image, ".target sm_80\n") && holds(image, &entry)
}

pub fn targets() {
    let (nvrtc, sources) = (nvrtc(), sources());
    for target in ["sm_80", "sm_90a"] {
        let compiled =
            compile::compile(&unit("double.cu", target), &sources, &nvrtc, None).unwrap();
        assert!(is_cubin(&image(&compiled), "twice"), "{target}");
        let entry = format!("Compiling entry function 'twice' for '{target}'");
        assert!(compiled.log.contains(&entry), "{}", compiled.log);
    }
    let unit = unit("double.cu", "compute_80");
    let ptx = compile::compile(&unit, &sources, &nvrtc, None).unwrap();
    assert!(is_ptx(&image(&ptx), "twice"), "{ptx:?}");
}

pub fn errors_are_told() {
    let (nvrtc, sources) = (nvrtc(), sources());
    let error = compile::compile(&unit("wrong.cu", "sm_80"), &sources, &nvrtc, None).unwrap_err();
    let Error::Compile(message) = &error else {
        panic!("{error:?}");
    };
    for part in ["wrong.cu", "sm_80", "undeclared"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

pub fn compilations_are_cached() {
    let (nvrtc, sources) = (nvrtc(), sources());
    let cache = CubinCache::new(folder("cached"));
    let unit = unit("double.cu", "sm_80");
    let hash = unit.hash(&sources.closure("double.cu").unwrap(), nvrtc.version());
    let first = compile::compile(&unit, &sources, &nvrtc, Some(&cache)).unwrap();
    assert_eq!(cache.get(hash), Some(first.clone()));

    let other = Compiled {
        millis: first.millis + 1,
        ..first.clone()
    };
    cache.put(hash, &other).unwrap();
    let second = compile::compile(&unit, &sources, &nvrtc, Some(&cache)).unwrap();
    assert_eq!(second, other, "taken from the cache");

    std::fs::write(cache.path(hash), "damaged").unwrap();
    let third = compile::compile(&unit, &sources, &nvrtc, Some(&cache)).unwrap();
    assert!(image(&third).starts_with(b"\x7fELF"), "compiled again");
    assert_eq!(cache.get(hash), Some(third), "and repaired");
}

pub fn a_cache_never_fails() {
    let (nvrtc, sources) = (nvrtc(), sources());
    let file = folder("file");
    std::fs::create_dir_all(&file).unwrap();
    std::fs::write(file.join("x"), "").unwrap();
    let cache = CubinCache::new(file.join("x/cache"));
    compile::compile(&unit("double.cu", "sm_80"), &sources, &nvrtc, Some(&cache)).unwrap();
}

pub fn many_at_once() {
    let (nvrtc, sources) = (nvrtc(), sources());
    let units: Vec<Unit> = (0..6)
        .map(|i| Unit {
            defines: vec![format!("ZERO={i}.0f")],
            ..unit(if i == 3 { "wrong.cu" } else { "double.cu" }, "sm_80")
        })
        .collect();
    let cache = CubinCache::new(folder("many"));
    let results = workers::compile_all(&units, &sources, &nvrtc, &cache, 3);
    assert_eq!(results.len(), units.len());
    for (i, result) in results.iter().enumerate() {
        assert_eq!(result.is_err(), i == 3, "{i}: {result:?}");
        let alone = compile::compile(&units[i], &sources, &nvrtc, None);
        assert_eq!(
            alone.map(|compiled| compiled.image),
            result.clone().map(|compiled| compiled.image),
            "{i}: the order is kept, and compilations side by side do not disturb each other"
        );
    }
}

pub fn a_named_compiler_that_is_not_there() {
    for path in [
        "",
        "/nonexistent/libnvrtc.so.13",
        env!("CARGO_MANIFEST_DIR"),
    ] {
        let error = Nvrtc::named(Path::new(path)).unwrap_err();
        assert!(
            matches!(&error, Error::Unsupported(m) if m.contains("FOLIO_NVRTC") && m.contains(path)),
            "{error:?}"
        );
    }
}

pub fn every_source_exists() {
    let sources = loader::embedded().unwrap().sources();
    for row in kernels::table() {
        let closure = sources.closure(row.source).unwrap();
        assert!(
            closure.source.1.contains(row.symbol),
            "{}: no {}",
            row.source,
            row.symbol
        );
    }
}

pub fn the_bundle_is_complete() {
    let bundle = loader::embedded().unwrap();
    if bundle.is_empty() {
        harness::skip("the library was built without NVRTC");
    }
    for row in kernels::table().filter(|row| row.bundled) {
        for target in row.arch.bundle_targets() {
            let unit = Unit::new(row, target);
            let image = bundle.image(&unit).unwrap();
            let image = image.unwrap_or_else(|| panic!("{} for {target} is missing", row.name));
            match unit.is_ptx() {
                true => assert!(is_ptx(&image, row.symbol), "{} for {target}", row.name),
                false => assert!(is_cubin(&image, row.symbol), "{} for {target}", row.name),
            }
        }
    }
}
