//! What the rows of a run came to over other keys, where its outputs are added to that. The outputs may lie in the same memory:
//! of a row, whoever stores it is the only one to read it.
#![allow(unsafe_code)]

use super::addresses::Grid;
use crate::problem::{LogBase, Sum};
use std::f32::consts::LOG2_E;

/// The sum, as addresses.
pub struct Before {
    o: Grid,
    lse: Grid,
    to_base_2: f32,
    ends: bool,
}

impl Before {
    pub fn new(sum: &Sum, base: LogBase) -> Before {
        Before {
            o: Grid::new(&sum.o),
            lse: Grid::new(&sum.lse),
            to_base_2: match base {
                LogBase::E => LOG2_E,
                LogBase::Two => 1.0,
            },
            ends: sum.ends,
        }
    }

    /// Takes the lse of a row of the batch, in base 2: where the sum ends, that of no keys is left.
    pub fn take_lse(&self, token: i64, head: usize) -> f32 {
        let lse = self.lse.at(token, head).cast::<f32>();
        // SAFETY: the caller of the run vouches for a row of fp32 for each of its own, and a row is one item's.
        unsafe {
            let before = *lse * self.to_base_2;
            if self.ends {
                *lse = f32::NEG_INFINITY;
            }
            before
        }
    }

    /// Columns of a row of the batch, from `first` on.
    pub fn copy(&self, token: i64, head: usize, first: usize, columns: &mut [f32]) {
        let row = self.o.at(token, head).cast::<f32>().wrapping_add(first);
        // SAFETY: as above, and the columns are those of the run's own output.
        unsafe { std::ptr::copy_nonoverlapping(row, columns.as_mut_ptr(), columns.len()) };
    }
}
