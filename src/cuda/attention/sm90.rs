//! What the Hopper kernels have in common on the host: groups of tokens, rows that a tensor map can
//! describe, and tensor maps built dimension by dimension.

use crate::cuda::driver::{Driver, L2Promotion, Swizzle, TensorMap, Tiled};
use crate::error::Result;
use crate::tensor::Tensor;

/// Tokens of a group, the rows of a swizzle atom.
pub const GROUP: u32 = 8;

/// Rows do not coincide. Where they do, a map has no stride for them.
pub fn rows_are_distinct(tensor: &Tensor) -> bool {
    let distinct = |(&extent, &stride): (&i64, &i64)| extent <= 1 || stride > 0;
    tensor.shape().iter().zip(tensor.strides()).all(distinct)
}

/// A tensor map under construction, the innermost dimension first.
pub struct Map {
    tensor: Tensor,
    rank: usize,
    extents: [u64; 5],
    boxes: [u32; 5],
    strides: [u64; 5],
    l2_promotion: L2Promotion,
}

impl Map {
    /// Of no dimension yet.
    pub fn new(tensor: &Tensor) -> Map {
        Map {
            tensor: *tensor,
            rank: 0,
            extents: [1; 5],
            boxes: [1; 5],
            strides: [16; 5],
            l2_promotion: L2Promotion::Bytes128,
        }
    }

    /// Adds a dimension. `stride` is in elements; where there is one index it does not matter, and may be
    /// anything.
    pub fn dimension(mut self, extent: u32, in_box: u32, stride: i64) -> Map {
        self.extents[self.rank] = u64::from(extent);
        self.boxes[self.rank] = in_box;
        if extent > 1 {
            self.strides[self.rank] = stride as u64 * self.tensor.dtype().size() as u64;
        }
        self.rank += 1;
        self
    }

    /// Brings more to L2 around each request than 128 bytes, or less.
    pub fn promoting(mut self, l2_promotion: L2Promotion) -> Map {
        self.l2_promotion = l2_promotion;
        self
    }

    /// The map as the hardware reads it.
    pub fn encode(&self, driver: Driver, swizzle: Swizzle) -> Result<TensorMap> {
        TensorMap::encode(
            driver,
            &Tiled {
                dtype: self.tensor.dtype(),
                address: self.tensor.address() as u64,
                extents: &self.extents[..self.rank],
                strides: &self.strides[1..self.rank],
                box_extents: &self.boxes[..self.rank],
                element_strides: &[1; 5][..self.rank],
                swizzle,
                l2_promotion: self.l2_promotion,
            },
        )
    }
}

/// Bytes of keys and values up to which the evict-first policy serves them: 8/5 of L2. (96 MiB on an H200, whose L2 of
/// 60 MiB it was measured with.)
pub fn evict_first_bytes(l2_bytes: u32) -> u64 {
    u64::from(l2_bytes) * 8 / 5
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_of_an_h200_is_the_measured_one() {
        assert_eq!(evict_first_bytes(60 << 20), 96 << 20);
    }
}
