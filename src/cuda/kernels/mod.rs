//! The kernel table: which compiled code exists for which problem. Rows are data; the kernels are in
//! `kernels/`, and nothing here compiles, loads or launches. (`build.rs` includes this module too, to
//! know what to compile: it may use only the vocabulary.)
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
//! and then the family's own `defines`. Rows with equal source and defines share one compilation.

mod generic;
mod row;
mod sm90_decode;
mod sm90_prefill;
mod table;

pub use row::{Arch, Family, Fit, Op, Query, Row, Shape, Types, target};
pub use table::{candidates, table, unsupported};
