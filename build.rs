//! Link arguments of `libfolio.so`, what the compiler can do, and the bundle of compiled GPU kernels.
//!
//! Kernels are compiled where NVRTC is found (`FOLIO_NVRTC`, `.tools/nvrtc`, a CUDA toolkit); elsewhere,
//! or where `FOLIO_NVRTC` is empty, the bundle holds their sources only. Results are kept in the target folder by content hash, so that
//! a change of Rust code compiles no kernel. As many are compiled at a time as Cargo runs jobs.

fn main() {
    #[cfg(feature = "cuda")]
    cuda::compiler::workers::serve_if_worker();
    println!("cargo:rerun-if-changed=build.rs");
    // A Rust library that has touched a thread-local must never be unmapped (rust-lang/rust#91979).
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfolio.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    avx512();
    #[cfg(feature = "cuda")]
    bundle::build();
}

/// `cfg(folio_avx512)` where the compiler has the AVX-512 intrinsics: x86-64, Rust 1.89 or later. With an
/// older one the CPU backend goes up to AVX2.
fn avx512() {
    println!("cargo::rustc-check-cfg=cfg(folio_avx512)");
    let x86_64 = std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64");
    if x86_64 && rust_minor().is_some_and(|minor| minor >= 89) {
        println!("cargo::rustc-cfg=folio_avx512");
    }
}

/// The second part of the compiler's version; 1 comes before it.
fn rust_minor() -> Option<u32> {
    let rustc = std::env::var_os("RUSTC")?;
    let output = std::process::Command::new(rustc).arg("--version").output();
    let version = String::from_utf8(output.ok()?.stdout).ok()?;
    version
        .strip_prefix("rustc 1.")?
        .split('.')
        .next()?
        .parse()
        .ok()
}

#[cfg(feature = "cuda")]
#[allow(dead_code)]
#[path = "src/error.rs"]
mod error;

#[cfg(feature = "cuda")]
#[allow(dead_code)]
#[path = "src/dtype.rs"]
mod dtype;

#[cfg(feature = "cuda")]
#[allow(dead_code, unused_imports)]
#[path = "src/cuda"]
mod cuda {
    pub mod compiler {
        pub mod bundle;
        pub mod compile;
        pub mod cubin_cache;
        pub mod hash;
        pub mod nvrtc;
        pub mod packed;
        pub mod unit;
        pub mod workers;
    }
    pub mod kernels;
}

#[cfg(feature = "cuda")]
mod bundle {
    use std::path::{Path, PathBuf};

    use crate::cuda::compiler::bundle::Writer;
    use crate::cuda::compiler::unit::Sources;
    use crate::cuda::compiler::{compile, nvrtc, workers};
    use crate::cuda::kernels;
    use crate::error::Result;

    /// What decides about the bundle beside the environment. (`.tools/nvrtc` cannot be watched while it
    /// does not exist; whoever unpacks a wheel there touches this file.)
    const WATCHED: [&str; 12] = [
        "kernels",
        "src/dtype.rs",
        "src/error.rs",
        "src/cuda/compiler/bundle.rs",
        "src/cuda/compiler/compile.rs",
        "src/cuda/compiler/cubin_cache.rs",
        "src/cuda/compiler/hash.rs",
        "src/cuda/compiler/nvrtc.rs",
        "src/cuda/compiler/packed.rs",
        "src/cuda/compiler/unit.rs",
        "src/cuda/compiler/workers.rs",
        "src/cuda/kernels",
    ];

    /// Writes `$OUT_DIR/kernels.bundle`.
    pub fn build() {
        println!("cargo:rerun-if-env-changed={}", nvrtc::VARIABLE);
        for path in WATCHED {
            println!("cargo:rerun-if-changed={path}");
        }
        let sources = compile::read_sources(Path::new("kernels")).expect("kernels/ is readable");
        let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR"));
        let bundle = match nvrtc::Nvrtc::find(&[compile::NVRTC_FOLDER.into()]) {
            Ok(nvrtc) => {
                with_images(&sources, &nvrtc, &out).unwrap_or_else(|error| panic!("{error}"))
            }
            Err(reason) if named() => panic!("{reason}"),
            Err(reason) => {
                println!(
                    "cargo:warning=libfolio gets kernel sources but no compiled kernels: {reason}"
                );
                with_sources(0, &sources).finish()
            }
        };
        std::fs::write(out.join("kernels.bundle"), bundle).expect("OUT_DIR is writable");
    }

    /// Whoever names a compiler wants that one, and a build without it would be a surprise.
    fn named() -> bool {
        std::env::var_os(nvrtc::VARIABLE).is_some_and(|path| !path.is_empty())
    }

    fn with_sources(version: u32, sources: &Sources) -> Writer {
        let mut writer = Writer::new(version);
        for (path, text) in sources.iter() {
            writer.source(path, text);
        }
        writer
    }

    fn with_images(sources: &Sources, nvrtc: &nvrtc::Nvrtc, out: &Path) -> Result<Vec<u8>> {
        let units = compile::units(kernels::table().filter(|row| row.bundled));
        let cache = compile::build_cache(out);
        let results = workers::compile_all(&units, sources, nvrtc, &cache, workers::jobs());
        let mut writer = with_sources(nvrtc.version(), sources);
        for (unit, compiled) in units.iter().zip(results) {
            writer.image(unit, &compiled?.image);
        }
        Ok(writer.finish())
    }
}
