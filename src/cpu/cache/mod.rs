//! Writing to paged caches on the CPU.

pub mod append;
