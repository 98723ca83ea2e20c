//! The documents name files and tests that exist: links, paths in backticks, and the tests of docs/features.md and
//! docs/coverage.md.
//! Whether what they say is true is for readers to see.

use std::path::{Path, PathBuf};

/// Folders whose files the documents name by their path from the root.
const FOLDERS: [&str; 11] = [
    "benches",
    "cmake",
    "docs",
    "examples",
    "examples-c",
    "include",
    "integrations",
    "kernels",
    "python",
    "src",
    "tests",
];

/// Folders of Python tests.
const PYTHON_TESTS: [&str; 6] = [
    "python/tests",
    "integrations/torch/tests",
    "integrations/vllm/tests",
    "integrations/sglang/tests",
    "integrations/paddle/tests",
    "integrations/fastdeploy/tests",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All documents, with their paths from the root.
fn documents() -> Vec<(PathBuf, String)> {
    let mut folders = vec![
        PathBuf::new(),
        "docs".into(),
        "docs/kernels".into(),
        "benches/cpu".into(),
        "benches/gpu".into(),
        "python".into(),
    ];
    let mut found = Vec::new();
    for folder in folders.drain(..) {
        for entry in std::fs::read_dir(root().join(&folder)).unwrap() {
            let path = folder.join(entry.unwrap().file_name());
            if path.extension().is_some_and(|extension| extension == "md") {
                let text = std::fs::read_to_string(root().join(&path)).unwrap();
                found.push((path, text));
            }
        }
    }
    found
}

/// The text between every `open` and the next `close` of the same line.
fn between<'a>(text: &'a str, open: &'a str, close: char) -> impl Iterator<Item = &'a str> {
    text.lines()
        .filter(|line| !line.starts_with("    "))
        .flat_map(move |line| {
            line.split(open)
                .skip(1)
                .step_by(if open.ends_with(close) { 2 } else { 1 })
                .filter_map(move |rest| rest.split(close).next())
        })
}

/// Relative links of a document that lead nowhere.
fn broken_links(path: &Path, text: &str) -> Vec<String> {
    between(text, "](", ')')
        .filter(|link| !link.starts_with("http") && !link.starts_with('#'))
        .map(|link| link.split('#').next().unwrap_or(link))
        .filter(|link| !root().join(path).with_file_name(link).exists())
        .map(|link| format!("{}: the link {link} leads nowhere", path.display()))
        .collect()
}

/// Paths in backticks that do not exist. `{a,b}` and `*` stand for several files and are not looked at.
fn missing_paths(path: &Path, text: &str) -> Vec<String> {
    let is_path = |name: &&str| {
        name.split_once('/')
            .is_some_and(|(folder, _)| FOLDERS.contains(&folder))
            && !name.contains([' ', '*', '{', '<', '…'])
    };
    let exists = |name: &str| {
        let file = name.split("::").next().unwrap_or(name);
        root().join(file).exists() || root().join(format!("{file}.rs")).exists()
    };
    between(text, "`", '`')
        .filter(is_path)
        .filter(|name| !exists(name))
        .map(|name| format!("{}: there is no {name}", path.display()))
        .collect()
}

/// Every source of a test: `tests/name.rs`, `tests/name/*.rs`, the `name.py` of Python tests (of every folder that has one), or a
/// rule of the Makefile.
fn source_of_test(name: &str) -> Option<String> {
    let read = |path: PathBuf| std::fs::read_to_string(path).ok();
    if let Some(target) = name.strip_prefix("make ") {
        let rules = read(root().join("Makefile"))?;
        let mut lines = rules.lines();
        return Some(
            lines
                .find(|line| line.starts_with(&format!("{target}:")))?
                .to_owned(),
        );
    }
    let rust = root().join("tests").join(format!("{name}.rs"));
    let python = PYTHON_TESTS.map(|folder| root().join(folder).join(format!("{name}.py")));
    let files: String = std::iter::once(rust)
        .chain(python)
        .filter_map(read)
        .collect();
    if !files.is_empty() {
        return Some(files);
    }
    let files = std::fs::read_dir(root().join("tests").join(name)).ok()?;
    Some(files.filter_map(|file| read(file.ok()?.path())).collect())
}

/// What a cell such as `` `grids` (draft_trees), `golden`; `cuda` `` names and is not there.
fn missing_tests(cell: &str) -> Vec<String> {
    let mut missing = Vec::new();
    for part in cell.split('`').collect::<Vec<_>>()[1..].chunks(2) {
        let (name, rest) = (part[0], part.get(1).unwrap_or(&""));
        let Some(source) = source_of_test(name) else {
            missing.push(format!("there is no test {name}"));
            continue;
        };
        let functions = rest.trim_start().strip_prefix('(');
        let functions = functions.and_then(|rest| rest.split(')').next());
        for function in functions.into_iter().flat_map(|list| list.split(", ")) {
            let is_there = |keyword| source.contains(&format!("{keyword} {function}("));
            if !is_there("fn") && !is_there("def") {
                missing.push(format!("{name} has no {function}"));
            }
        }
    }
    missing
}

#[test]
fn documents_name_what_exists() {
    let documents = documents();
    assert!(documents.len() > 10, "the documents were not found");
    let wrong: Vec<String> = documents
        .iter()
        .flat_map(|(path, text)| [broken_links(path, text), missing_paths(path, text)].concat())
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Whether rows of a table name tests that exist, in the column so many before the end of the line.
fn check_tests_of(document: &str, column_from_end: usize) {
    let text = std::fs::read_to_string(root().join(document)).unwrap();
    let rows = text
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains('`'));
    let mut checked = 0;
    let mut wrong = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.split(" |").collect();
        let test = cells[cells.len() - 1 - column_from_end];
        checked += usize::from(test.contains('`'));
        if test.contains('`') {
            wrong.extend(
                missing_tests(test)
                    .iter()
                    .map(|what| format!("{row}\n  {what}")),
            );
        }
    }
    assert!(checked > 30, "only {checked} rows name a test");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_feature_names_tests_that_exist() {
    check_tests_of("docs/features.md", 2);
    check_tests_of("docs/coverage.md", 1);
}

#[test]
fn what_is_missing_is_found() {
    let page = Path::new("docs/concepts.md");
    assert_eq!(
        broken_links(page, "[a](abi.md#threads) [b](../README.md)").len(),
        0
    );
    assert_eq!(
        broken_links(page, "[a](abj.md) and [b](README.md)").len(),
        2
    );
    assert_eq!(
        missing_paths(page, "`src/plan/` and `src/lib.rs`, `page · size`").len(),
        0
    );
    assert_eq!(
        missing_paths(page, "`src/plans/` and `src/lib.rs`").len(),
        1
    );
    assert_eq!(missing_tests(" `grids` (sinks); `cuda`").len(), 0);
    assert_eq!(missing_tests(" `grids` (no_such_grid), `grid`").len(), 2);
}
