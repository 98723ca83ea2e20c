//! What a test run could not test, collected for the last line of `make test`: a line for each in the
//! file that `FOLIO_SKIPS` names. Nothing is collected where that is unset. `.ci/skip` writes the same lines from shell.

use std::io::Write;
use std::path::Path;

/// Names the file.
pub const VARIABLE: &str = "FOLIO_SKIPS";

/// Adds a line to the file, if there is one: what was not tested, and why.
pub fn note(what: &str, reason: &str) {
    if let Some(file) = std::env::var_os(VARIABLE).filter(|file| !file.is_empty()) {
        append(Path::new(&file), what, reason);
    }
}

/// Adds a line to a file. One write, so that lines of processes side by side do not mix.
pub fn append(path: &Path, what: &str, reason: &str) {
    let mut options = std::fs::File::options();
    let line = format!("{}\t{}\n", one_line(what), one_line(reason));
    let written = options
        .append(true)
        .create(true)
        .open(path)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    written.unwrap_or_else(|error| panic!("{VARIABLE}={}: {error}", path.display()));
}

/// Without the characters that separate fields and lines.
fn one_line(text: &str) -> String {
    text.replace(['\t', '\n'], " ")
}
