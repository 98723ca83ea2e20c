//! What the shared library shows to the linker: the functions of the header and nothing else, its soname,
//! and that it needs no library but the system's.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The cdylib that cargo built along with this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let library = test.with_file_name("libfolio.so");
    assert!(library.is_file(), "{} is missing", library.display());
    library
}

fn output(program: &str, arguments: &[&str]) -> String {
    let result = Command::new(program)
        .args(arguments)
        .arg(library())
        .output();
    let result = result.unwrap_or_else(|error| panic!("{program} (from binutils): {error}"));
    assert!(result.status.success(), "{program} failed");
    String::from_utf8(result.stdout).expect("UTF-8")
}

fn exported() -> BTreeSet<String> {
    let symbols = output("nm", &["--dynamic", "--defined-only"]);
    let names = symbols
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2));
    names.map(str::to_owned).collect()
}

/// The functions that the header declares: `folio_x(`, but not the slots `(*x)(`.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(root().join("include/folio/folio.h")).expect("the header");
    let code: Vec<&str> = header
        .lines()
        .filter(|line| !line.trim_start().starts_with(['*', '/', '#']))
        .collect();
    let code = code.join("\n");
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let before_parentheses = code.split('(').map(|part| {
        let start = part.rfind(|c| !is_name(c)).map_or(0, |at| at + 1);
        part[start..].to_owned()
    });
    before_parentheses
        .filter(|name| name.starts_with("folio_"))
        .collect()
}

/// `FOLIO_BLESS=1` accepts a new list; removing a name is a break of the ABI.
#[test]
fn exactly_the_known_functions_are_exported() {
    let path = root().join("tests/abi/symbols.txt");
    let exported: Vec<String> = exported().into_iter().collect();
    let text = exported.join("\n") + "\n";
    if std::env::var_os("FOLIO_BLESS").is_some() {
        std::fs::write(&path, &text).expect("the list is writable");
    }
    let known = std::fs::read_to_string(&path).expect("tests/abi/symbols.txt");
    assert!(
        known == text,
        "exported: {exported:#?}\nknown:\n{known}\nif a function was added, run: FOLIO_BLESS=1 cargo test --test symbols"
    );
    let strangers = exported.iter().filter(|name| !name.starts_with("folio_"));
    assert_eq!(strangers.collect::<Vec<_>>(), [""; 0]);
}

#[test]
fn the_header_declares_what_is_exported() {
    assert_eq!(declared(), exported());
}

#[test]
fn the_library_names_itself_and_needs_only_the_system() {
    let dynamic = output("readelf", &["--dynamic", "--wide"]);
    let entries = |tag: &str| -> Vec<String> {
        let lines = dynamic.lines().filter(|line| line.contains(tag));
        let names = lines.filter_map(|line| line.split(['[', ']']).nth(1));
        names.map(str::to_owned).collect()
    };
    assert_eq!(entries("(SONAME)"), ["libfolio.so.0"]);
    assert!(
        dynamic.contains("NODELETE"),
        "a thread-local would outlive dlclose"
    );
    // libm and libdl are part of libc since glibc 2.34, and libraries of their own before.
    let system = [
        "libc.so",
        "libm.so",
        "libdl.so",
        "libpthread.so",
        "libgcc_s.so",
        "ld-linux",
    ];
    for needed in entries("(NEEDED)") {
        let known = system.iter().any(|name| needed.starts_with(name));
        assert!(known, "{needed} is needed at load time");
    }
}
