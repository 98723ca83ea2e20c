//! What one compilation consists of: a source, the headers it reaches, defines and a target. Says what
//! the compilation's content hash is; compiles nothing.

use std::collections::BTreeMap;

use super::hash::Hash;
use crate::cuda::kernels::Row;
use crate::error::{Error, Result};

/// The text of every file in `kernels/`, by its path relative to that folder.
#[derive(Debug, Clone, Default)]
pub struct Sources(BTreeMap<String, String>);

/// One source file with the headers that it reaches.
#[derive(Debug)]
pub struct Closure<'a> {
    /// The source's path and text.
    pub source: (&'a str, &'a str),
    /// Paths and texts of the headers, as they are named in `#include "..."`.
    pub headers: Vec<(&'a str, &'a str)>,
}

impl Sources {
    /// Takes over files.
    pub fn new(files: impl IntoIterator<Item = (String, String)>) -> Sources {
        Sources(files.into_iter().collect())
    }

    /// Paths and texts.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// The source and everything that it includes, directly or not.
    ///
    /// # Errors
    /// [`Error::Compile`] when a file does not exist.
    pub fn closure(&self, source: &str) -> Result<Closure<'_>> {
        let source = self.file(source, "the kernel table")?;
        let mut headers: Vec<(&str, &str)> = Vec::new();
        let mut open = vec![source];
        while let Some((path, text)) = open.pop() {
            for name in includes(text) {
                let header = self.file(name, path)?;
                if !headers.contains(&header) {
                    headers.push(header);
                    open.push(header);
                }
            }
        }
        headers.sort_unstable();
        Ok(Closure { source, headers })
    }

    fn file(&self, path: &str, wanted_by: &str) -> Result<(&str, &str)> {
        let found = self.0.get_key_value(path);
        found
            .map(|(path, text)| (path.as_str(), text.as_str()))
            .ok_or_else(|| {
                Error::Compile(format!(
                    "kernels/{path} does not exist; {wanted_by} names it"
                ))
            })
    }
}

/// The names in `#include "name"` lines.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let rest = line.trim_start().strip_prefix('#')?.trim_start();
        let name = rest
            .strip_prefix("include")?
            .trim_start()
            .strip_prefix('"')?;
        name.split_once('"').map(|(name, _)| name)
    })
}

/// One compilation. Rows that share one differ in their symbol only.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Unit {
    /// File, relative to `kernels/`.
    pub source: String,
    /// As `NAME` or `NAME=VALUE`.
    pub defines: Vec<String>,
    /// As the compiler names it, such as `sm_90a`; or a virtual one, such as `compute_80`, for PTX.
    pub target: String,
}

impl Unit {
    /// The compilation of a row.
    pub fn new(row: &Row, target: &str) -> Unit {
        Unit {
            source: row.source.into(),
            defines: row.defines.clone(),
            target: target.into(),
        }
    }

    /// Whether the result is PTX, which the driver compiles for its device, and not a cubin.
    pub fn is_ptx(&self) -> bool {
        self.target.starts_with("compute_")
    }

    /// Whether this is the PTX that the cubin of another unit is assembled from, so that one run of the compiler makes both.
    pub fn is_ptx_of(&self, cubin: &Unit) -> bool {
        let same_code = (&self.source, &self.defines) == (&cubin.source, &cubin.defines);
        let versions = (
            self.target.strip_prefix("compute_"),
            cubin.target.strip_prefix("sm_"),
        );
        same_code && matches!(versions, (Some(of_ptx), Some(of_cubin)) if of_ptx == of_cubin)
    }

    /// A name that tells units of the same sources apart.
    pub fn key(&self) -> String {
        format!("{} {} {}", self.target, self.source, self.defines.join(" "))
    }

    /// The compiler's options.
    pub fn options(&self) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={}", self.target),
            "--std=c++17".into(),
            "--ptxas-options=-v".into(),
        ];
        options.extend(
            self.defines
                .iter()
                .map(|define| format!("--define-macro={define}")),
        );
        options
    }

    /// Names the result: equal hashes, equal images.
    pub fn hash(&self, closure: &Closure<'_>, compiler: u32) -> u128 {
        let mut hash = Hash::new().field(&compiler.to_le_bytes());
        for option in self.options() {
            hash = hash.field(option.as_bytes());
        }
        for (path, text) in std::iter::once(&closure.source).chain(&closure.headers) {
            hash = hash.field(path.as_bytes()).field(text.as_bytes());
        }
        hash.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources() -> Sources {
        let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
        Sources::new([
            file(
                "a.cu",
                "#include \"common/x.cuh\"\n  # include \"params.h\"\nint a;",
            ),
            file("b.cu", "// #include \"none.h\"\nint b;"),
            file("broken.cu", "#include \"missing.cuh\"\n"),
            file(
                "common/x.cuh",
                "#include \"params.h\"\n#include \"common/x.cuh\"\n",
            ),
            file("params.h", ""),
        ])
    }

    fn unit(source: &str, define: &str, target: &str) -> Unit {
        Unit {
            source: source.into(),
            defines: vec![define.into()],
            target: target.into(),
        }
    }

    #[test]
    fn a_closure_holds_what_is_reached_and_no_more() {
        let sources = sources();
        let closure = sources.closure("a.cu").unwrap();
        let paths: Vec<_> = closure.headers.iter().map(|header| header.0).collect();
        assert_eq!(paths, ["common/x.cuh", "params.h"]);
        assert!(sources.closure("b.cu").unwrap().headers.is_empty());
    }

    #[test]
    fn a_missing_file_is_named_with_its_includer() {
        let message = sources().closure("broken.cu").unwrap_err().to_string();
        assert!(
            message.contains("missing.cuh") && message.contains("broken.cu"),
            "{message}"
        );
    }

    #[test]
    fn ptx_belongs_to_the_cubin_of_its_code_and_version() {
        let ptx = unit("a.cu", "D=64", "compute_80");
        assert!(ptx.is_ptx_of(&unit("a.cu", "D=64", "sm_80")));
        for other in [
            unit("a.cu", "D=64", "sm_90a"),
            unit("a.cu", "D=128", "sm_80"),
            unit("b.cu", "D=64", "sm_80"),
            ptx.clone(),
        ] {
            assert!(!ptx.is_ptx_of(&other), "{other:?}");
            assert!(!other.is_ptx_of(&ptx), "{other:?}");
        }
    }

    #[test]
    fn everything_that_changes_an_image_changes_its_hash() {
        let sources = sources();
        let a = sources.closure("a.cu").unwrap();
        let b = sources.closure("b.cu").unwrap();
        let hashes = [
            unit("a.cu", "D=64", "sm_80").hash(&a, 13000),
            unit("a.cu", "D=128", "sm_80").hash(&a, 13000),
            unit("a.cu", "D=64", "sm_90a").hash(&a, 13000),
            unit("a.cu", "D=64", "sm_80").hash(&a, 13010),
            unit("a.cu", "D=64", "sm_80").hash(&b, 13000),
        ];
        for (i, hash) in hashes.iter().enumerate() {
            assert!(!hashes[..i].contains(hash), "{i}");
        }
        assert_eq!(hashes[0], unit("a.cu", "D=64", "sm_80").hash(&a, 13000));
    }
}
