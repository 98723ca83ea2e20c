//! The kernel table: which compiled code exists for which problem. Rows are data; the kernels are in
//! `kernels/`, and nothing here compiles, loads or launches. (`build.rs` includes this module too, to
//! know what to compile: it may use only the vocabulary.)
//!
//! Every operator with a key has a file with its rows, the key that a problem finds them by, and the refusal of a
//! problem that has none. [`Row`] is what they have in common, and [`table()`] lists all of them.
//!
//! # What a kernel source may rely on
//! NVRTC compiles `source` with no include path: `#include "ptx/ptx.cuh"` names a file relative to
//! `kernels/`, whatever folder the including file is in. Every fact of the row is defined, so that it
//! stands in one place:
//!
//! | define | value |
//! | --- | --- |
//! | `FOLIO_Q`, `FOLIO_KV`, `FOLIO_O` | `f32`, `f16`, `bf16`, `e4m3` or `e5m2`: names of C++ types |
//! | `FOLIO_HEAD_DIM_QK`, `FOLIO_HEAD_DIM_VO` | the row's dims; 0 where the kernel takes any |
//! | `FOLIO_Q_TILE`, `FOLIO_KV_TILE`, `FOLIO_THREADS`, `FOLIO_SHARED_BYTES` | as in the row |
//!
//! and then what the row's variant says. For append Q is the type of the new tokens and KV that of the
//! cache; merges have one type, and where a kernel has none all three are `f32`. Rows with equal source
//! and defines share one compilation.

pub mod append;
pub mod attention;
pub mod keyless;
pub mod merge;
pub mod mla;
pub mod projection;
pub mod projection_few;
mod row;
mod table;
pub mod up_projection;

pub use row::{Arch, Row, target, waits_for_prerequisites};
pub use table::table;
