//! Folio: attention over paged KV caches for LLM inference runtimes, behind a stable C ABI.
//!
//! The header `include/folio/folio.h` is the product; this crate implements it and offers the same
//! operators to Rust in [`api`].
//!
//! # Layers
//! `ffi → api → backend → reference | cpu | cuda → plan`, and `kernels/` behind `cuda`. Nothing points upward: `ffi`
//! never names a backend, and nothing behind `ffi` sees a C type. No two modules import each other in a circle. The
//! vocabulary that all of them share is [`error`], [`dtype`], [`tensor`] and [`problem`]. `tests/layers.rs` reads the
//! `use` lines and enforces this.
//!
//! # Five rules
//! 1. The header is the product; Rust, CUDA and CMake serve it.
//! 2. Nothing the host did wrong, and nothing missing on the machine, may abort the host.
//! 3. All memory that outlives a call belongs to the caller; `run` allocates nothing and synchronises
//!    nothing.
//! 4. A reader can say from a function's signature who owns, who mutates and which thread may call.
//! 5. One fact stands in one place; what must be written twice is compared by a test.
#![deny(unsafe_code)]

pub mod api;
pub mod backend;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod dtype;
pub mod error;
pub mod ffi;
pub mod log;
pub mod plan;
pub mod problem;
pub mod reference;
pub mod tensor;
