//! Tensors of rows as addresses: where the first row is, and the bytes from one to the next along each dimension.

use crate::cpu::kernels::rows::Rows;
use crate::tensor::Tensor;

/// A cache tensor: address, and strides in bytes.
#[derive(Clone, Copy)]
pub struct Cache {
    pub base: *const u8,
    pub page: i64,
    pub token: i64,
    pub head: i64,
}

/// A `[token, head]` tensor of rows: address, and strides in bytes.
#[derive(Clone, Copy)]
pub struct Grid {
    pub base: *mut u8,
    token: i64,
    head: i64,
}

impl Cache {
    pub fn new(tensor: &Tensor) -> Cache {
        let bytes = tensor.dtype().size() as i64;
        Cache {
            base: tensor.address() as *const u8,
            page: tensor.stride(0) * bytes,
            token: tensor.stride(1) * bytes,
            head: tensor.stride(2) * bytes,
        }
    }

    /// Rows of one head at offsets from `base`, wherever they lie.
    pub fn anywhere(base: *const u8) -> Cache {
        Cache {
            base,
            page: 0,
            token: 0,
            head: 0,
        }
    }

    /// Where the row at a slot of a page starts, for the first head.
    pub fn offset(&self, page: i64, slot: i64) -> i64 {
        page * self.page + slot * self.token
    }

    /// That row.
    pub fn row(&self, page: i64, slot: i64) -> *const u8 {
        self.base.wrapping_offset(self.offset(page, slot) as isize)
    }

    /// Keys or values of one head at `offsets`.
    pub fn rows(&self, head: usize, offsets: &[i64]) -> Rows {
        Rows {
            base: self
                .base
                .wrapping_offset((head as i64 * self.head) as isize),
            offsets: offsets.as_ptr(),
            count: offsets.len(),
        }
    }
}

impl Grid {
    pub fn new(tensor: &Tensor) -> Grid {
        let bytes = tensor.dtype().size() as i64;
        Grid {
            base: tensor.address() as *mut u8,
            token: tensor.stride(0) * bytes,
            head: tensor.stride(1) * bytes,
        }
    }

    pub fn offset(&self, token: i64, head: usize) -> i64 {
        token * self.token + head as i64 * self.head
    }

    pub fn at(&self, token: i64, head: usize) -> *mut u8 {
        self.base.wrapping_offset(self.offset(token, head) as isize)
    }
}
