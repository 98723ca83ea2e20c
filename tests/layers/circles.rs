//! No two modules of `src` import each other in a circle. A module is a file. It imports another one where its `use`
//! lines, or `crate::` and `super::` paths in its code, lead to something that is written in that file. A folder's
//! `mod.rs` may hand on what its files offer (`pub use`), which is no import: who names it there imports the file
//! that it is written in.

use super::{product_code, rust_files, source};
use std::collections::{BTreeMap, BTreeSet};

/// A path of identifiers from the crate's root.
type Path = Vec<String>;

/// Every module by its path, with what it imports and what it hands on.
#[derive(Default)]
struct Modules {
    files: BTreeMap<Path, Imports>,
}

#[derive(Default)]
struct Imports {
    /// What the code names.
    named: BTreeSet<Path>,
    /// Name to where it comes from: `pub use` of the module's own files.
    handed_on: BTreeMap<String, Path>,
}

impl Modules {
    fn add(&mut self, file: &str, text: &str) {
        let code = product_code(text);
        let module = module_path(file);
        let mut imports = Imports::default();
        for (is_public, path) in used_paths(&code) {
            let Some(path) = absolute(&module, &path, &declared(&code)) else {
                continue;
            };
            let of_own_file = file.ends_with("mod.rs") && path.starts_with(&module);
            match path.last().filter(|_| is_public && of_own_file) {
                Some(name) => drop(imports.handed_on.insert(name.clone(), path.clone())),
                None => drop(imports.named.insert(path)),
            }
        }
        for path in inline_paths(&code) {
            imports.named.extend(absolute(&module, &path, &[]));
        }
        self.files.insert(module, imports);
    }

    /// The module in which what `path` names is written.
    fn home(&self, path: &[String]) -> Option<Path> {
        let module = (0..=path.len()).rev().map(|len| &path[..len]);
        let module = module
            .into_iter()
            .find(|prefix| self.files.contains_key(*prefix))?;
        let name = path.get(module.len());
        match name.and_then(|name| self.files[module].handed_on.get(name)) {
            Some(origin) if origin.as_slice() != path => self.home(origin),
            _ => Some(module.to_vec()),
        }
    }

    fn imported(&self, module: &Path) -> BTreeSet<Path> {
        let homes = self.files[module].named.iter();
        let homes = homes.filter_map(|path| self.home(path));
        homes
            .filter(|home| home != module && !home.is_empty())
            .collect()
    }

    /// A circle, if there is one.
    fn circle(&self) -> Option<Vec<String>> {
        let mut done = BTreeSet::new();
        self.files
            .keys()
            .find_map(|module| self.circle_from(module, &mut Vec::new(), &mut done))
    }

    fn circle_from(
        &self,
        module: &Path,
        way: &mut Vec<Path>,
        done: &mut BTreeSet<Path>,
    ) -> Option<Vec<String>> {
        if let Some(start) = way.iter().position(|passed| passed == module) {
            let circle = way[start..].iter().chain([module]);
            return Some(circle.map(|path| path.join("::")).collect());
        }
        if done.contains(module) {
            return None;
        }
        way.push(module.clone());
        let found = self
            .imported(module)
            .iter()
            .find_map(|next| self.circle_from(next, way, done));
        way.pop();
        done.insert(module.clone());
        found
    }
}

/// `cpu/attention/run.rs` is `cpu::attention::run`, `cpu/mod.rs` is `cpu`.
fn module_path(file: &str) -> Path {
    let file = file.trim_end_matches(".rs").trim_end_matches("/mod");
    file.split('/').map(str::to_owned).collect()
}

/// The modules that a file declares.
fn declared(code: &str) -> Vec<String> {
    let lines = code.lines().map(str::trim);
    let names = lines.filter_map(|line| {
        let line = line.strip_prefix("pub ").unwrap_or(line);
        line.strip_prefix("mod ")?.strip_suffix(';')
    });
    names.map(str::to_owned).collect()
}

/// The paths of all `use` items, groups written out, and whether they are public.
fn used_paths(code: &str) -> Vec<(bool, Path)> {
    let mut paths = Vec::new();
    let mut rest = code;
    while let Some(at) = rest.find("use ") {
        let line = rest[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let before = rest[line..at].trim();
        let starts = before.is_empty() || before.starts_with("pub");
        rest = &rest[at + 4..];
        if !starts {
            continue;
        }
        let end = rest.find(';').unwrap_or(rest.len());
        let mut expanded = Vec::new();
        expand(&rest[..end], &[], &mut expanded);
        paths.extend(expanded.into_iter().map(|path| (before == "pub", path)));
        rest = &rest[end..];
    }
    paths
}

/// `a::{b, c::d}` are `a::b` and `a::c::d`.
fn expand(tree: &str, prefix: &[String], paths: &mut Vec<Path>) {
    let tree = tree.trim();
    let (head, group) = match tree.find('{') {
        Some(at) => (&tree[..at], tree[at + 1..].strip_suffix('}')),
        None => (tree, None),
    };
    let head = head.split(" as ").next().unwrap_or(head);
    let mut path = prefix.to_vec();
    let parts = head.split("::").map(str::trim);
    path.extend(
        parts
            .filter(|part| !part.is_empty() && !["self", "*"].contains(part))
            .map(str::to_owned),
    );
    let Some(group) = group else {
        return paths.push(path);
    };
    let (mut nesting, mut start) = (0, 0);
    for (at, c) in group.char_indices() {
        match c {
            '{' => nesting += 1,
            '}' => nesting -= 1,
            ',' if nesting == 0 => {
                expand(&group[start..at], &path, paths);
                start = at + 1;
            }
            _ => {}
        }
    }
    if !group[start..].trim().is_empty() {
        expand(&group[start..], &path, paths);
    }
}

/// The `crate::` and `super::` paths in code.
fn inline_paths(code: &str) -> Vec<Path> {
    let mut paths = Vec::new();
    for root in ["crate::", "super::"] {
        for (at, _) in code.match_indices(root) {
            let part_of_longer = code[..at].ends_with(|c: char| c.is_alphanumeric() || c == ':');
            let text = &code[at..];
            let end = text.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
            if !part_of_longer {
                let path = text[..end.unwrap_or(text.len())].split("::");
                paths.push(
                    path.filter(|part| !part.is_empty())
                        .map(str::to_owned)
                        .collect(),
                );
            }
        }
    }
    paths
}

/// A path as seen from the crate's root; `None` for what is not of this crate.
fn absolute(module: &[String], path: &[String], children: &[String]) -> Option<Path> {
    let first = path.first()?;
    let mut rest = path;
    let mut absolute = module.to_vec();
    match first.as_str() {
        "crate" => {
            absolute.clear();
            rest = &path[1..];
        }
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                absolute.pop();
                rest = &rest[1..];
            }
        }
        _ if children.contains(first) => {}
        _ => return None,
    }
    absolute.extend_from_slice(rest);
    Some(absolute)
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let mut modules = Modules::default();
    for file in rust_files(&source()) {
        let path = file.strip_prefix(source()).expect("below src");
        let text = std::fs::read_to_string(&file).expect("a readable file");
        let path = path.to_string_lossy();
        if path != "lib.rs" {
            modules.add(&path, &text);
        }
    }
    assert!(modules.files.len() > 50, "the sources are somewhere else");
    assert_eq!(modules.circle(), None);
}

/// The test itself: circles are found, and what only looks like one is not.
#[test]
fn circles_are_found() {
    let circle = |files: &[(&str, &str)]| {
        let mut modules = Modules::default();
        for (path, text) in files {
            modules.add(path, text);
        }
        modules.circle()
    };
    for files in [
        &[("a.rs", "use crate::b::B;"), ("b.rs", "use super::a;")][..],
        &[
            ("a/x.rs", "fn f() -> super::y::Y {}"),
            ("a/y.rs", "use super::x::{X, Z};"),
            ("a/mod.rs", "mod x;\nmod y;"),
        ],
        // Through what a folder hands on.
        &[
            ("a/mod.rs", "mod x;\nmod y;\npub use x::X;"),
            ("a/x.rs", "use super::y::Y;"),
            ("a/y.rs", "use super::X;"),
        ],
        // A folder and its file, each with something of its own.
        &[
            ("a/mod.rs", "mod x;\nuse x::X;\npub struct Own;"),
            ("a/x.rs", "use super::Own;"),
        ],
        &[
            ("a.rs", "use crate::{\n    b::{self, B},\n    c::C,\n};"),
            ("b.rs", "use crate::c;"),
            ("c.rs", "use crate::a::A;"),
        ],
    ] {
        assert!(circle(files).is_some(), "{files:?}");
    }
    for files in [
        &[
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "// use crate::a::A;"),
        ][..],
        &[
            ("a/mod.rs", "mod x;\nmod y;\npub use x::X;\npub use y::Y;"),
            ("a/x.rs", "use super::Y;"),
            ("a/y.rs", "pub struct Y;"),
        ],
        &[
            (
                "a.rs",
                "pub struct A;\n#[cfg(test)]\nmod tests {\n    use crate::b::B;\n}",
            ),
            ("b.rs", "use crate::a::A;"),
        ],
    ] {
        assert_eq!(circle(files), None, "{files:?}");
    }
}
