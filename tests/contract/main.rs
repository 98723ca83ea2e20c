//! The contract of the C functions with callers who err: every entry, every field. Each bad call gets its
//! status and a sentence that names field and value, and changes nothing. And with callers who use many
//! threads, as far as the header allows.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;

mod arguments;
mod backends;
mod batches;
mod cascade;
mod context_parallel;
mod copy;
mod descs;
mod extend;
mod figures;
mod fixture;
mod formats;
mod freedoms;
mod gather;
mod host_threads;
mod index;
mod limits;
mod logs;
mod merge;
mod mla;
mod mla_cache;
mod mla_context;
mod nulls;
mod peers;
mod rope_append;
mod structs;
mod stub;
mod table;
mod tensors;
mod threads;
mod tree;
mod workspaces;
