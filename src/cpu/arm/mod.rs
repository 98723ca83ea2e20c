//! The instruction sets of AArch64: their vector types.

pub mod neon;
