//! Attention on the CPU: the handle, one run of its plan, and the walks over work items.

pub mod few_rows;
pub mod handle;
pub mod many_rows;
#[cfg(folio_avx512)]
pub mod many_rows_bf16;
pub mod mask;
pub mod next_tile;
#[cfg(folio_avx512)]
pub mod pack;
pub mod run;
pub mod scratch;
pub mod shape;
