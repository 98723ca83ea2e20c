//! Transposition of rows of 32-bit words. Staged keys become the right-hand side of q·kᵀ by it.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]

use super::rows::Rows;
use super::simd::{Simd, Task};

/// Rows that are transposed at a time.
pub const BLOCK: usize = 16;

/// `dst[c][r] = rows[r][c]` for up to 16 rows of `columns` 32-bit words, a multiple of 16; columns of
/// missing rows hold anything.
#[derive(Clone, Copy)]
pub struct Transpose {
    pub rows: Rows,
    pub dst: *mut f32,
    pub ld: usize,
    pub columns: usize,
}

impl Task for Transpose {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let mut rows = [std::ptr::null::<f32>(); BLOCK];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = self.rows.at_row(r.min(self.rows.count - 1)).cast();
        }
        for column in (0..self.columns).step_by(S::LANES) {
            for r in (0..BLOCK).step_by(S::LANES) {
                let dst = self.dst.add(column * self.ld + r);
                S::transpose(&rows[r..r + S::LANES], dst, self.ld);
            }
            for row in &mut rows {
                *row = row.wrapping_add(S::LANES);
            }
        }
    }
}
