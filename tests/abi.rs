//! The frozen facts of released ABIs (`tests/abi/*.c`) still hold for today's header, in C and in C++; and
//! they cover all of it.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn facts() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("tests/abi")).expect("tests/abi");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    let facts: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .collect();
    assert!(!facts.is_empty());
    facts
}

/// Compiles without writing anything. Gives what the compiler said.
fn compile(file: &Path, language: &[&str], include: &Path) -> Result<(), String> {
    let result = Command::new("cc")
        .args(language)
        .args([
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-fsyntax-only",
            "-I",
        ])
        .args([include, file])
        .output()
        .expect("a C compiler named cc");
    match result.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&result.stderr).into_owned()),
    }
}

const C: [&str; 3] = ["-x", "c", "-std=c11"];
const CPP: [&str; 3] = ["-x", "c++", "-std=c++17"];

#[test]
fn sizes_offsets_and_numbers_are_those_that_were_released() {
    for file in facts() {
        for language in [C, CPP] {
            assert_eq!(compile(&file, &language, &root().join("include")), Ok(()));
        }
    }
}

/// A changed header is noticed: a number, a size, an order of fields.
#[test]
fn a_changed_header_is_noticed() {
    let header = std::fs::read_to_string(root().join("include/folio/folio.h")).expect("the header");
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("changed");
    std::fs::create_dir_all(folder.join("folio")).expect("a writable target folder");
    for (was, is) in [
        ("#define FOLIO_KV_RAGGED 1", "#define FOLIO_KV_RAGGED 2"),
        (
            "    uint32_t max_batch_size;",
            "    uint64_t max_batch_size;",
        ),
        ("    float sm_scale;", "    float q_scale_;"),
        ("    char message[504];", "    char message[248];"),
    ] {
        let changed = header.replacen(was, is, 1);
        assert_ne!(changed, header, "{was} is not in the header");
        std::fs::write(folder.join("folio/folio.h"), changed).expect("a writable target folder");
        let results = facts().into_iter().map(|file| compile(&file, &C, &folder));
        assert!(
            results.into_iter().any(|result| result.is_err()),
            "{was} may change"
        );
    }
}

/// Every constant and every struct of the header has its line.
#[test]
fn the_facts_cover_the_header() {
    let header = std::fs::read_to_string(root().join("include/folio/folio.h")).expect("the header");
    let facts: Vec<String> = facts()
        .iter()
        .map(|file| std::fs::read_to_string(file).expect("a readable file"))
        .collect();
    let stated = |fact: String| facts.iter().any(|text| text.contains(&fact));
    for line in header.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["#define", name, value] if value.parse::<i64>().is_ok() => {
                assert!(
                    stated(format!("SAME({name}, {value});")),
                    "{name} is not frozen"
                );
            }
            ["typedef", "struct", name, "{"] => {
                assert!(stated(format!("SIZE({name}, ")), "{name} is not frozen");
            }
            _ => {}
        }
    }
}
