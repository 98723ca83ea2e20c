//! The documents name files and tests that exist: links, paths in backticks, the tests of docs/features.md and
//! docs/coverage.md, and Python tests, make targets and functions of suites wherever they are named.
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
const PYTHON_TESTS: [&str; 7] = [
    "python/tests",
    "python/tests/grids",
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

/// Every source of a test: `tests/name.rs`, the suite `tests/cpu/name.rs`, `tests/name/*.rs`, the `name.py` of Python tests (of
/// every folder that has one), or a rule of the Makefile.
fn source_of_test(name: &str) -> Option<String> {
    let read = |path: PathBuf| std::fs::read_to_string(path).ok();
    if let Some(command) = name.strip_prefix("make ") {
        let target = command.split(' ').next()?;
        let rules = read(root().join("Makefile"))?;
        let mut lines = rules.lines();
        return Some(
            lines
                .find(|line| line.starts_with(&format!("{target}:")))?
                .to_owned(),
        );
    }
    let rust = ["tests", "tests/cpu"].map(|folder| root().join(folder).join(format!("{name}.rs")));
    let python = PYTHON_TESTS.map(|folder| root().join(folder).join(format!("{name}.py")));
    let files: String = rust.into_iter().chain(python).filter_map(read).collect();
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
            if !defines(&source, function) {
                missing.push(format!("{name} has no {function}"));
            }
        }
    }
    missing
}

/// Whether a test's source has that function or, for suites of several files, that module.
fn defines(source: &str, name: &str) -> bool {
    ["fn ", "def "]
        .iter()
        .any(|keyword| source.contains(&format!("{keyword}{name}(")))
        || source.contains(&format!("\nmod {name};"))
}

/// Where the Python tests lie that a document names.
fn python_tests_of(document: &Path) -> &'static [&'static str] {
    match document.to_str() {
        Some("docs/fastdeploy.md") => {
            &["integrations/paddle/tests", "integrations/fastdeploy/tests"]
        }
        Some("docs/paddle.md") => &["integrations/paddle/tests"],
        Some("docs/pytorch.md") => &["integrations/torch/tests"],
        Some("docs/sglang.md") => &["integrations/sglang/tests"],
        Some("docs/vllm.md") => &["integrations/vllm/tests"],
        _ => &PYTHON_TESTS,
    }
}

/// Names and contents of the Python files of some folders.
fn python_files(folders: &[&str]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for folder in folders {
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "py") {
                let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                found.push((name, std::fs::read_to_string(path).unwrap()));
            }
        }
    }
    found
}

/// Names that begin with `test_`, in backticks or not, of which no Python test has the name of its file or function.
fn missing_python_tests(path: &Path, text: &str) -> Vec<String> {
    let files = python_files(python_tests_of(path));
    let exists = |name: &str| {
        let names_it = |(file, source): &(String, String)| file == name || defines(source, name);
        files.iter().any(names_it)
    };
    text.lines()
        .filter(|line| !line.starts_with("    "))
        .flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_'))
        .filter(|word| word.starts_with("test_") && !exists(word))
        .map(|word| format!("{}: there is no test {word}", path.display()))
        .collect()
}

/// `` `make target` `` without a rule, and `` `tests/suite` (function) `` without the function.
fn missing_suites(path: &Path, text: &str) -> Vec<String> {
    let mut missing = Vec::new();
    for line in text.lines().filter(|line| !line.starts_with("    ")) {
        for part in line.split('`').collect::<Vec<_>>()[1..].chunks(2) {
            let (name, rest) = (part[0], part.get(1).unwrap_or(&""));
            let suite = name
                .strip_prefix("tests/")
                .filter(|_| rest.starts_with(" ("));
            if suite.is_some() || name.starts_with("make ") {
                let name = suite.unwrap_or(name);
                let name = name.strip_suffix(".rs").unwrap_or(name);
                let functions = if suite.is_some() { rest } else { &"" };
                missing.extend(missing_tests(&format!("`{name}`{functions}")));
            }
        }
    }
    let page = path.display();
    missing
        .iter()
        .map(|what| format!("{page}: {what}"))
        .collect()
}

#[test]
fn documents_name_what_exists() {
    let documents = documents();
    assert!(documents.len() > 10, "the documents were not found");
    let wrong: Vec<String> = documents
        .iter()
        .flat_map(|(path, text)| {
            [
                broken_links(path, text),
                missing_paths(path, text),
                missing_python_tests(path, text),
                missing_suites(path, text),
            ]
            .concat()
        })
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
    assert_eq!(missing_tests(" `grids` (no_such_grid), `gird`").len(), 2);
    let page = Path::new("docs/vllm.md");
    let tests = "`test_engine`, test_the_engine";
    assert_eq!(missing_python_tests(page, tests).len(), 1);
    let page = Path::new("docs/paddle.md");
    assert_eq!(missing_python_tests(page, "`test_engine`").len(), 1);
    let suites =
        "`make dist DIST_ARCH=aarch64` `tests/contract` (tensors), `tests/cpu/grids.rs` (sinks)";
    assert_eq!(missing_suites(page, suites).len(), 0);
    let suites =
        "`make dists` `tests/contract` (no_module, tensors), `tests/cpu/grids.rs` (no_grid)";
    assert_eq!(missing_suites(page, suites).len(), 3);
}
