//! Numbers of the caller that are added to logits: their rows as f32, a tile of keys at a time.
#![allow(unsafe_code)]

use super::item::Item;
use crate::cpu::kernels::convert::Stage;
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::table::Kernels;
use crate::dtype::{self, DType};
use crate::problem::ScoreBias;
use std::ops::Range;

/// What is added to the logits of a run.
#[derive(Clone, Copy)]
pub struct Bias {
    base: *const u8,
    dtype: DType,
    /// In elements, from head to head, row to row and column to column.
    strides: [i64; 3],
    request_rows: bool,
    new_keys: bool,
}

impl Bias {
    pub fn of(bias: &ScoreBias) -> Bias {
        Bias {
            base: bias.tensor.address() as *const u8,
            dtype: bias.tensor.dtype(),
            strides: [0, 1, 2].map(|dim| bias.tensor.stride(dim)),
            request_rows: bias.request_rows,
            new_keys: bias.new_keys,
        }
    }

    /// Whether query heads have numbers of their own.
    pub fn is_of_heads(&self) -> bool {
        self.strides[0] != 0
    }

    /// The key of column 0.
    fn first_key(&self, item: &Item<'_>) -> i64 {
        match self.new_keys {
            true => item.mask.position(0),
            false => 0,
        }
    }

    /// Whether some of `keys` have columns.
    pub fn is_over(&self, item: &Item<'_>, keys: &Range<i64>) -> bool {
        self.first_key(item) < keys.end
    }

    /// The numbers of `keys` for a token of the item and a query head: 0 where there is no column, and from the last key up
    /// to the next multiple of 32.
    pub fn load(
        &self,
        kernels: &Kernels,
        item: &Item<'_>,
        (token, qo_head): (usize, usize),
        keys: &Range<i64>,
        to: &mut [f32],
    ) {
        let n = (keys.end - keys.start) as usize;
        let first = (self.first_key(item) - keys.start).clamp(0, n as i64) as usize;
        let row = token as i64
            + match self.request_rows {
                true => item.q_start,
                false => item.token,
            };
        let column = keys.start + first as i64 - self.first_key(item);
        let [head_stride, row_stride, column_stride] = self.strides;
        let at = qo_head as i64 * head_stride + row * row_stride + column * column_stride;
        to[..n.next_multiple_of(32)].fill(0.0);
        self.read(kernels, at, &mut to[first..n]);
    }

    /// The columns from element `at` on. They are the tensor's: it has all rows and keys of the batch, as was checked.
    fn read(&self, kernels: &Kernels, at: i64, to: &mut [f32]) {
        const TOGETHER: usize = 16;
        let stride = self.strides[2];
        let whole = match stride {
            1 => to.len() / TOGETHER * TOGETHER,
            _ => 0,
        };
        if whole > 0 {
            let stage = Stage {
                rows: Rows {
                    base: self.base,
                    offsets: &(at * self.dtype.size() as i64),
                    count: 1,
                },
                dim: whole,
                dst: to.as_mut_ptr(),
                width: whole,
                strip: 0,
            };
            // SAFETY: the row has as many columns, and `to` room for them.
            unsafe { kernels.stage[self.dtype as usize](&stage) };
        }
        for (column, element) in to.iter_mut().enumerate().skip(whole) {
            let at = (at + column as i64 * stride) as isize;
            // SAFETY: as above.
            *element = unsafe { dtype::load(self.base, self.dtype, at) };
        }
    }
}
