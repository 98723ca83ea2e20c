//! The layer rule: `ffi → api → backend → reference | cpu | cuda → plan`, and a vocabulary that all of them share.
//! Nothing points upward, and no two modules import each other in a circle. What a file names is read from its `use`
//! lines and from its `crate::` and `super::` paths.

#[path = "layers/circles.rs"]
mod circles;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// What every layer may name.
const VOCABULARY: [&str; 5] = ["dtype", "error", "log", "problem", "tensor"];

/// What a layer may name besides itself and the vocabulary. Every top-level module has its row.
const LAYERS: [(&str, &[&str]); 12] = [
    ("ffi", &["api"]),
    ("api", &["plan", "backend"]),
    // Only its registry: see REGISTRY.
    ("backend", &[]),
    ("reference", &["backend"]),
    ("cpu", &["backend", "plan"]),
    ("cuda", &["backend", "plan"]),
    ("plan", &[]),
    ("dtype", &[]),
    ("error", &[]),
    ("log", &[]),
    ("problem", &[]),
    ("tensor", &[]),
];

/// The one file that knows which backends there are.
const REGISTRY: (&str, &[&str]) = ("backend/registry.rs", &["reference", "cpu", "cuda"]);

/// The vocabulary's own order: `problem → tensor → dtype → error`; a word may use those before it.
const WORDS: [&str; 5] = ["error", "log", "dtype", "tensor", "problem"];

/// What is wrong with a file, given its path below `src` and its text.
fn violations(path: &str, text: &str) -> Vec<String> {
    let layer = path
        .split('/')
        .next()
        .unwrap_or(path)
        .trim_end_matches(".rs");
    if layer == "lib" {
        return Vec::new();
    }
    let Some((_, allowed)) = LAYERS.iter().find(|row| row.0 == layer) else {
        return vec![format!("{path}: `{layer}` has no row in tests/layers.rs")];
    };
    let below = |name: &str| match WORDS.iter().position(|word| *word == layer) {
        Some(at) => WORDS[..at].contains(&name),
        None => VOCABULARY.contains(&name) || allowed.contains(&name),
    };
    let in_registry = |name: &str| path == REGISTRY.0 && REGISTRY.1.contains(&name);
    named(path, &product_code(text))
        .into_iter()
        .filter(|name| name != layer && !below(name) && !in_registry(name))
        .map(|name| format!("{path}: `{layer}` must not name `{name}`"))
        .collect()
}

/// The text without comments and without its unit tests, which may name what they need.
fn product_code(text: &str) -> String {
    let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
    let lines = product
        .lines()
        .map(|line| line.split("//").next().unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

/// The top-level modules that a file names.
fn named(path: &str, code: &str) -> BTreeSet<String> {
    let to_root = "super::".repeat(depth(path));
    let mut names = BTreeSet::new();
    for root in ["crate::", &to_root] {
        for (at, _) in code.match_indices(root) {
            let before = code[..at].chars().next_back();
            let rest = &code[at + root.len()..];
            let part_of_longer =
                before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':');
            if part_of_longer && root != "crate::" || rest.starts_with("super::") {
                continue;
            }
            if let Some(group) = rest.strip_prefix('{') {
                names.extend(group_members(group));
            } else {
                names.insert(identifier(rest));
            }
        }
    }
    names
}

/// How many `super::` lead from a file to the crate's root.
fn depth(path: &str) -> usize {
    let components = path.split('/').count();
    components - usize::from(path.ends_with("/mod.rs"))
}

/// The first identifiers of `a::b, c, d::{e, f}}`.
fn group_members(group: &str) -> Vec<String> {
    let (mut nesting, mut starts, mut members) = (0, true, Vec::new());
    for (at, c) in group.char_indices() {
        match c {
            '{' => nesting += 1,
            '}' if nesting == 0 => break,
            '}' => nesting -= 1,
            ',' if nesting == 0 => starts = true,
            c if starts && !c.is_whitespace() => {
                members.push(identifier(&group[at..]));
                starts = false;
            }
            _ => {}
        }
    }
    members
}

fn identifier(text: &str) -> String {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    text[..end.unwrap_or(text.len())].to_owned()
}

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// Every Rust file below `folder`.
fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a readable folder");
    let mut files = Vec::new();
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

#[test]
fn nothing_points_upward() {
    let files = rust_files(&source());
    assert!(files.len() > 20, "the sources are somewhere else");
    let violations: Vec<String> = (files.iter())
        .flat_map(|file| {
            let path = file.strip_prefix(source()).expect("below src");
            let text = std::fs::read_to_string(file).expect("a readable file");
            violations(&path.to_string_lossy(), &text)
        })
        .collect();
    assert!(violations.is_empty(), "{violations:#?}");
}

#[test]
fn every_module_has_its_row() {
    let root = std::fs::read_to_string(source().join("lib.rs")).expect("src/lib.rs");
    let modules = root
        .lines()
        .filter_map(|line| line.strip_prefix("pub mod "));
    let modules: BTreeSet<&str> = modules.map(|name| name.trim_end_matches(';')).collect();
    assert_eq!(modules, LAYERS.iter().map(|row| row.0).collect());
    assert_eq!(BTreeSet::from(WORDS), BTreeSet::from(VOCABULARY));
}

/// The test itself: broken rules are found, and what only looks like one is not.
#[test]
fn broken_rules_are_found() {
    for (path, text) in [
        ("cpu/run.rs", "use crate::api::Context;"),
        ("plan/image.rs", "    let x = crate::backend::Stream(y);"),
        ("cuda/launch.rs", "use crate::cpu::threads;"),
        ("cpu/merge.rs", "use crate::reference::ReferenceBackend;"),
        ("ffi/decode.rs", "use crate::{error::Error, cuda::driver};"),
        (
            "ffi/decode.rs",
            "use crate::{\n    api::{Attention, Stream},\n    backend,\n};",
        ),
        ("ffi/decode.rs", "use super::super::reference;"),
        ("ffi/mod.rs", "use super::cuda::driver;"),
        (
            "cuda/kernels/table.rs",
            "use super::super::super::api::Context;",
        ),
        ("plan/schedule.rs", "use crate::api;"),
        ("backend/mod.rs", "use crate::cpu;"),
        ("backend/registry.rs", "use crate::ffi::folio_status;"),
        ("tensor.rs", "use crate::problem::Mask;"),
        ("tensor.rs", "use super::backend::Stream;"),
        ("error.rs", "use crate::ffi::folio_status;"),
        ("new_layer/mod.rs", ""),
    ] {
        assert_eq!(violations(path, text).len(), 1, "{path}: {text}");
    }
    for (path, text) in [
        (
            "ffi/decode.rs",
            "use crate::api::Stream;\nuse super::handle;\nuse super::{sized, types};",
        ),
        ("ffi/decode.rs", "// use crate::cpu\n/// [`crate::cuda`]"),
        (
            "cuda/workspace.rs",
            "#[cfg(test)]\nmod tests {\n    use crate::plan::schedule;\n}",
        ),
        (
            "cuda/kernels/table.rs",
            "use super::super::launch;\nuse crate::cuda::module;",
        ),
        ("backend/registry.rs", "use crate::cpu::CpuBackend;"),
        (
            "problem/batch.rs",
            "use crate::{tensor::Tensor, dtype::DType};\nuse super::work;",
        ),
        ("tensor.rs", "use crate::dtype::DType;"),
    ] {
        assert_eq!(violations(path, text), [""; 0], "{path}: {text}");
    }
}
