//! How the operators' kernels move rows: by vectors where all of them are aligned, else by elements.

use crate::cuda::params::row_alignment;
use crate::tensor::Tensor;

/// Elements that a thread moves at once where rows are aligned.
pub const VECTOR: u32 = 8;

/// Rows are whole vectors, each aligned to itself or to 16 bytes.
pub fn moves_vectors(tensor: &Tensor) -> bool {
    let bytes = (VECTOR as usize * tensor.dtype().size()).min(16) as u32;
    let dim = tensor.extent(tensor.rank() - 1);
    dim % i64::from(VECTOR) == 0 && row_alignment(tensor) >= bytes
}
