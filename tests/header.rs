//! `include/folio/folio.h` is `src/ffi/folio.h.in` with every `@file@` replaced by what cbindgen makes of
//! that file of `src/ffi` today.
//!
//! One run of cbindgen over all files would put all constants first, then all types, then all functions. A
//! run per file keeps what belongs to a subject together.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The file whose declarations a line of the template stands for.
fn part(line: &str) -> Option<&str> {
    line.strip_prefix('@')?.strip_suffix('@')
}

/// The public types of a file. cbindgen leaves out those that no function of the same file mentions, unless
/// it is told their names.
fn types(source: &str) -> Vec<String> {
    let items = source.lines().filter_map(|line| {
        line.strip_prefix("pub struct ")
            .or_else(|| line.strip_prefix("pub type "))
    });
    items
        .map(|item| {
            let end = item.find(|c: char| !c.is_alphanumeric() && c != '_');
            item[..end.unwrap_or(item.len())].to_owned()
        })
        .collect()
}

/// What cbindgen makes of one file. It says `struct` before the structs of the same file only; the header
/// says it nowhere but in their definitions.
fn declarations(file: &str) -> String {
    let path = root().join("src/ffi").join(format!("{file}.rs"));
    let mut config =
        cbindgen::Config::from_file(root().join("cbindgen.toml")).expect("cbindgen.toml");
    config.export.include = types(&text(&format!("src/ffi/{file}.rs")));
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(path)
        .generate();
    let mut generated = Vec::new();
    bindings
        .unwrap_or_else(|error| panic!("cbindgen and src/ffi/{file}.rs: {error}"))
        .write(&mut generated);
    let generated = String::from_utf8(generated).expect("UTF-8");
    let lines = generated.trim().lines().map(|line| match line {
        line if line.starts_with("typedef struct ") => line.to_owned(),
        line => line.replace("struct folio_", "folio_"),
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn header() -> String {
    let template = text("src/ffi/folio.h.in");
    let lines = template.lines().map(|line| match part(line) {
        Some(file) => declarations(file),
        None => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n") + "\n"
}

#[test]
fn the_committed_header_is_in_step_with_the_sources() {
    let path = root().join("include/folio/folio.h");
    let generated = header();
    if std::env::var_os("FOLIO_BLESS").is_some() {
        std::fs::write(&path, &generated).expect("the header is writable");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == generated,
        "include/folio/folio.h is out of step with src/ffi; mend it with: FOLIO_BLESS=1 cargo test --test header"
    );
}

/// Every file that declares something for C has its place in the header.
#[test]
fn the_template_names_every_file_that_declares_something() {
    let template = text("src/ffi/folio.h.in");
    let named: BTreeSet<PathBuf> = (template.lines())
        .filter_map(part)
        .map(|file| root().join("src/ffi").join(format!("{file}.rs")))
        .collect();
    let entries = std::fs::read_dir(root().join("src/ffi")).expect("src/ffi");
    let declaring: BTreeSet<PathBuf> = entries
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| {
            let source = std::fs::read_to_string(path).expect("a readable file");
            [
                "\npub struct folio_",
                "\npub const FOLIO_",
                "\n#[unsafe(no_mangle)]",
            ]
            .iter()
            .any(|item| source.contains(item))
        })
        .collect();
    assert_eq!(named, declaring);
}

/// The bodies of the exported functions of a file, without comments.
fn bodies(source: &str) -> Vec<String> {
    let functions = source.split("#[unsafe(no_mangle)]\n").skip(1);
    let bodies = functions.map(|function| {
        let start = function.find("{\n").expect("a body") + 2;
        let end = function.find("\n}\n").expect("its end");
        let lines = function[start..end].lines().map(str::trim);
        let code: Vec<&str> = lines.filter(|line| !line.starts_with("//")).collect();
        let code = code.join(" ");
        match code.strip_prefix("unsafe {") {
            Some(inner) => inner.trim_end_matches('}').trim().to_owned(),
            None => code,
        }
    });
    bodies.collect()
}

/// A function of the ABI is its signature and one call, of something that runs inside `guard`.
#[test]
fn an_exported_function_is_one_guarded_call() {
    const GUARDED: [&str; 7] = [
        "attention::",
        "handle::",
        "operate(",
        "compute(",
        "guard_value(",
        "launch(",
        "plan(",
    ];
    let mut functions = 0;
    for file in text("src/ffi/folio.h.in").lines().filter_map(part) {
        for body in bodies(&text(&format!("src/ffi/{file}.rs"))) {
            let guarded = GUARDED.iter().any(|gate| body.starts_with(gate));
            assert!(guarded && !body.contains(';'), "{file}.rs: {body}");
            functions += 1;
        }
    }
    assert_eq!(functions, text("tests/abi/symbols.txt").lines().count());
}

/// What C has, C++ has: every function of the table that can fail or that owns something is called by folio.hpp.
#[test]
fn every_function_has_its_form_in_cpp() {
    const PLAIN: [&str; 3] = ["version", "status_name", "device_count"];
    let header = text("include/folio/folio.h");
    let table = header.split("typedef struct folio_api {").nth(1);
    let slots: Vec<&str> = (table.expect("the table").lines())
        .filter_map(|line| line.split_once("(*")?.1.split_once(")("))
        .map(|(name, _)| name)
        .collect();
    let wrapper = text("include/folio/folio.hpp");
    let called = |name: &&str| {
        ["api().", "api.", "api->", "folio_api::"].iter().any(|by| {
            let call = format!("{by}{name}");
            wrapper.match_indices(&call).any(|(at, _)| {
                !wrapper[at + call.len()..].starts_with(|c: char| c == '_' || c.is_alphanumeric())
            })
        })
    };
    let missing: Vec<&&str> = (slots.iter())
        .filter(|name| !PLAIN.contains(name) && !called(name))
        .collect();
    // All that is exported but folio_get_api.
    assert_eq!(
        slots.len() + 1,
        text("tests/abi/symbols.txt").lines().count()
    );
    assert!(missing.is_empty(), "folio.hpp lacks {missing:?}");
}
