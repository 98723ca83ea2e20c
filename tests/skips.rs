//! The last line of `make test`: what is skipped is written down by Rust and by shell, and told with its
//! number and its reason.

#[path = "harness/skips.rs"]
#[allow(dead_code)]
mod skips;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn script(name: &str, arguments: &[&str], collected: Option<&Path>) -> Output {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(".ci").join(name);
    let mut command = Command::new(script);
    command.args(arguments).env_remove(skips::VARIABLE);
    if let Some(path) = collected {
        command.env(skips::VARIABLE, path);
    }
    let output = command.output().expect("the script runs");
    assert!(output.status.success(), "{name}: {output:?}");
    output
}

/// What the last line says about a file of skips.
fn told(file: &Path) -> String {
    let output = script("skips", &[file.to_str().expect("a path in UTF-8")], None);
    String::from_utf8(output.stdout).expect("text in UTF-8")
}

/// A path in the target folder where no file is.
fn fresh(name: &str) -> PathBuf {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_file(&file);
    file
}

#[test]
fn skips_are_counted_by_reason() {
    let file = fresh("skips_by_reason");
    let lines = "test cuda::a\tno CUDA device\n\
                 PyTorch\tpython3 has no PyTorch\n\
                 test cuda::b\tno CUDA device\n\
                 test cuda::a\tno CUDA device\n\
                 example\tno CUDA device\n\
                 test device::c\tno NVRTC\n";
    std::fs::write(&file, lines).unwrap();
    assert_eq!(
        told(&file),
        "skipped: PyTorch (python3 has no PyTorch); 2 tests, example (no CUDA device); 1 test (no NVRTC)\n"
    );
}

#[test]
fn no_skip_is_told_as_such() {
    assert_eq!(told(&fresh("no_skips")), "nothing was skipped\n");
}

#[test]
fn rust_and_shell_write_the_same_lines() {
    let file = fresh("skips_of_both");
    skips::append(&file, "test rust", "no\ttabs\nand no lines");
    let output = script("skip", &["shell", "a reason"], Some(&file));
    assert_eq!(output.stdout, b"skipped: shell: a reason\n");
    let lines = std::fs::read_to_string(&file).unwrap();
    assert_eq!(lines, "test rust\tno tabs and no lines\nshell\ta reason\n");
}
