//! The C ABI. This layer translates: C structs into the inputs of [`crate::api`], errors into status
//! codes, panics into errors. It checks what only C can get wrong (NULL, struct sizes, unknown numbers);
//! everything else is checked behind it.
//!
//! Rules, in the order a C reader meets them:
//! * Names are spelled here as in C, so that a search for `folio_decode_desc` finds everything.
//! * The first parameter is the object; inputs follow, then the stream, then outputs, `err` last.
//! * A `const` object pointer means the call may run concurrently with others of its kind.
//! * Outputs are written only on success.
//! * Exported functions are written out, not stamped by a macro: cbindgen reads the source.
//! * A function is its signature and one call. What handles share stands once, in `attention`.
//! * Every body runs inside `guard` or `guard_value`: nothing unwinds into C.
//!
//! Each file is a subject of the header; `folio.h.in` puts them in order and groups them.
#![allow(unsafe_code)]
#![allow(non_camel_case_types)]

mod append;
mod append_run;
mod args;
mod attention;
mod batch;
mod cascade;
mod context;
mod context_parallel;
mod copy;
mod decode;
mod error;
mod figures;
mod gather;
mod guard;
mod guard_value;
mod handle;
mod index;
mod kv_storage;
mod merge;
mod mla;
mod mla_cache;
mod mla_context;
mod numbers;
mod peers;
mod prefill;
mod projection;
mod rope_append;
mod sized;
mod status;
mod table;
mod tensor;
mod tree;
mod version;
mod workspace;

pub use append::*;
pub use append_run::*;
pub use args::*;
pub use attention::*;
pub use batch::*;
pub use cascade::*;
pub use context::*;
pub use context_parallel::*;
pub use copy::*;
pub use decode::*;
pub use error::*;
pub use figures::*;
pub use gather::*;
pub use index::*;
pub use kv_storage::*;
pub use merge::*;
pub use mla::*;
pub use mla_cache::*;
pub use mla_context::*;
pub use peers::*;
pub use prefill::*;
pub use projection::*;
pub use rope_append::*;
pub use status::*;
pub use table::*;
pub use tensor::*;
pub use tree::*;
pub use version::*;
pub use workspace::*;

// An aborting panic strategy would defeat `guard` and take the host process down.
#[cfg(all(panic = "abort", not(test)))]
compile_error!(
    "Folio's C ABI promises that no panic aborts the host; build with panic = \"unwind\""
);
