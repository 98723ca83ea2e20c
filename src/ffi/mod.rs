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
//! * Every body runs inside `guard`: nothing unwinds into C.
#![allow(unsafe_code)]
#![allow(non_camel_case_types)]

mod args;
mod batch;
mod cache;
mod context;
mod decode;
mod desc;
mod error;
mod guard;
mod handle;
mod prefill;
mod sized;
mod table;
mod types;
mod version;

pub use args::*;
pub use batch::*;
pub use cache::*;
pub use context::*;
pub use decode::*;
pub use desc::*;
pub use error::*;
pub use prefill::*;
pub use table::*;
pub use types::*;
pub use version::*;

// An aborting panic strategy would defeat `guard` and take the host process down.
#[cfg(all(panic = "abort", not(test)))]
compile_error!(
    "Folio's C ABI promises that no panic aborts the host; build with panic = \"unwind\""
);
