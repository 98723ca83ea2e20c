//! The 32 × 32 block that matrix products of bf16 are made of, on AMX (`x86::amx`) and by pairs (`x86::bf16_pairs`).
//! Only its layout is here.
//!
//! A block of A is 32 rows × a depth of 32 in bf16: two tiles of 16 rows of 64 bytes, one after the other. A block of
//! B has a row per pair of depths with the pairs (b[k][c], b[k + 1][c]) of 32 columns, 128 bytes in all. A block of C
//! is 32 rows of 32 floats. So every block is contiguous.

/// Rows, columns and depth of a block.
pub const SIDE: usize = 32;

/// Elements of a block.
pub const ELEMENTS: usize = SIDE * SIDE;
