//! Link arguments of `libfolio.so`: its soname, and `-z nodelete`, because a Rust library that has
//! touched a thread-local must never be unmapped (rust-lang/rust#91979).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libfolio.so.0");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
