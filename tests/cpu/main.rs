//! What the CPU and the oracle compute, through both doors: a suite to a file, by what it computes. One program, so that
//! `common` is compiled once for all of them.
//!
//! Suites that need a process of their own are programs beside this one.

#[path = "../common/mod.rs"]
mod common;

mod append;
mod attention;
mod cascade;
mod context_parallel;
mod copy;
mod cpu_rows;
mod extend;
mod far_offsets;
mod formats;
mod gather;
mod golden;
mod grids;
mod index;
mod invariance;
mod mla;
mod mla_cache;
mod mla_context;
mod projection;
mod rope_append;
mod states;
mod tree;
mod windows;
