//! Rows of elements in memory, converted between types by the kernels of the instruction set. The kernels take
//! multiples of eight elements; what is left of a row is converted one by one.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contracts that the functions state"
)]

use crate::cpu::kernels::convert::{Quantise, Stage, Store};
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::table::Kernels;
use crate::dtype::{self, DType};
use crate::tensor::Tensor;

/// Elements that are converted at a time.
pub const CHUNK: usize = 128;

/// A chunk as f32.
pub type Chunk = [f32; CHUNK];

/// A row of elements of one type.
#[derive(Clone, Copy)]
pub struct Row {
    pub at: *mut u8,
    pub dtype: DType,
}

impl Row {
    /// The row of `tensor` at these leading indices.
    pub fn of(tensor: &Tensor, index: &[i64]) -> Row {
        let offset: i64 = index.iter().zip(tensor.strides()).map(|(i, s)| i * s).sum();
        let bytes = offset as isize * tensor.dtype().size() as isize;
        Row {
            at: (tensor.address() as *mut u8).wrapping_offset(bytes),
            dtype: tensor.dtype(),
        }
    }

    /// From element `first` on.
    pub fn skip(self, first: usize) -> Row {
        Row {
            at: self.at.wrapping_add(first * self.dtype.size()),
            ..self
        }
    }

    /// Elements as f32, as many as `to` has room for; its length is a multiple of 16.
    ///
    /// # Safety
    /// `count` elements are readable.
    pub unsafe fn load(self, kernels: &Kernels, count: usize, to: &mut [f32]) {
        debug_assert!(to.len().is_multiple_of(16) && count <= to.len());
        let whole = count / 8 * 8;
        let task = Stage {
            rows: Rows {
                base: self.at,
                offsets: &0,
                count: 1,
            },
            dim: whole,
            dst: to.as_mut_ptr(),
            width: to.len(),
            strip: 0,
        };
        (kernels.stage[self.dtype as usize])(&task);
        for (i, value) in to.iter_mut().enumerate().take(count).skip(whole) {
            *value = dtype::load(self.at, self.dtype, i as isize);
        }
    }

    /// Stores `from · factor`; the length of `from` is a multiple of 16.
    ///
    /// # Safety
    /// `count` elements are writable.
    pub unsafe fn store(self, kernels: &Kernels, count: usize, from: &[f32], factor: f32) {
        debug_assert!(from.len().is_multiple_of(16) && count <= from.len());
        let whole = count / 8 * 8;
        let task = Store {
            src: from.as_ptr(),
            factor,
            dst: self.at,
            dim: whole,
        };
        (kernels.store[self.dtype as usize])(&task);
        for (i, value) in from.iter().enumerate().take(count).skip(whole) {
            dtype::store(self.at, self.dtype, i as isize, value * factor);
        }
    }

    /// Stores `from / divisor` in this row, which is fp8.
    ///
    /// # Safety
    /// `count` elements are readable in `from` and writable here.
    pub unsafe fn quantise(self, kernels: &Kernels, count: usize, from: Row, divisor: f32) {
        let whole = count / 8 * 8;
        let task = Quantise {
            src: from.at,
            divisor,
            dst: self.at,
            dim: whole,
            e5m2: self.dtype == DType::F8E5M2,
        };
        (kernels.quantise[from.dtype as usize])(&task);
        for i in whole..count {
            let value = dtype::load(from.at, from.dtype, i as isize);
            dtype::store(self.at, self.dtype, i as isize, value / divisor);
        }
    }

    /// Copies elements of its own type.
    ///
    /// # Safety
    /// `count` elements are readable in `from` and writable here, and the two do not overlap.
    pub unsafe fn copy(self, count: usize, from: Row) {
        std::ptr::copy_nonoverlapping(from.at, self.at, count * self.dtype.size());
    }
}
