//! `include/folio/folio.h` is what cbindgen makes of `src/ffi` today.

use std::path::Path;

/// The files of `src/ffi` that declare something for C, in the order of the header.
const SOURCES: [&str; 11] = [
    "version", "error", "types", "context", "desc", "batch", "args", "decode", "prefill", "cache",
    "table",
];

#[test]
fn the_committed_header_is_in_step_with_the_sources() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("include/folio/folio.h");
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml");
    let builder = SOURCES.iter().fold(
        cbindgen::Builder::new().with_config(config),
        |builder, name| builder.with_src(root.join(format!("src/ffi/{name}.rs"))),
    );
    let mut generated = Vec::new();
    builder
        .generate()
        .expect("cbindgen reads src/ffi")
        .write(&mut generated);
    if std::env::var_os("FOLIO_BLESS").is_some() {
        std::fs::write(&path, &generated).expect("the header is writable");
    }
    let committed = std::fs::read(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "include/folio/folio.h is out of step with src/ffi; mend it with: FOLIO_BLESS=1 cargo test --test header"
    );
}
