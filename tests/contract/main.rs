//! The contract of the C functions with callers who err: every entry, every field. Each bad call gets its
//! status and a sentence that names field and value, and changes nothing. And with callers who use many
//! threads, as far as the header allows.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;

mod fixture;
mod nulls;
mod structs;
mod tensors;
mod threads;
mod values;
mod workspaces;
