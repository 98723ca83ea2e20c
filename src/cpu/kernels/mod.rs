//! Kernels that are written once over a vector type and compiled for every instruction set.

#[cfg(folio_avx512)]
pub mod bf16_block;
pub mod bf16_split;
pub mod convert;
pub mod dot;
pub mod exp;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub mod fp8;
pub mod nontemporal_copy;
pub mod packed;
pub mod prefetch;
pub mod prefetch_rows;
pub mod product;
pub mod rows;
pub mod simd;
pub mod softmax;
pub mod table;
pub mod transpose;
#[cfg(folio_avx512)]
pub mod transposed_softmax;
