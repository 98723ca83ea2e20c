//! The instruction sets of x86-64: their vector types, and kernels that exist for one of them only.

#[cfg(folio_avx512)]
pub mod amx;
#[cfg(folio_avx512)]
pub mod amx_rows;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(folio_avx512)]
pub mod avx512;
#[cfg(folio_avx512)]
pub mod bf16_pairs;
#[cfg(folio_avx512)]
pub mod bf16_rows;
#[cfg(folio_avx512)]
pub mod bf16_vectors;
pub mod vendor;
