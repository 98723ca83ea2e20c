//! Attention on the CPU: the handle, one run of its plan, and the walks over work items.

mod addresses;
#[cfg(folio_avx512)]
mod amx_products;
mod before;
mod bias;
mod combine;
mod few_rows;
pub mod handle;
mod item;
mod keys;
mod many_rows;
#[cfg(folio_avx512)]
mod many_rows_bf16;
mod mask;
mod mask_starts;
mod next_tile;
mod outputs;
#[cfg(folio_avx512)]
mod pack;
mod row_scales;
mod row_softmax;
mod run;
mod scratch;
mod shape;
mod staged_values;
mod walk;
mod whole_rows;
