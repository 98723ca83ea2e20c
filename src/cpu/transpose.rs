//! Rows to columns: how staged keys become the right-hand side of q·kᵀ.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]

use super::simd::{Simd, Task};

/// `dst[c][r] = src[r][c]` for 16 rows of `columns` 32-bit words, a multiple of 16.
#[derive(Clone, Copy)]
pub struct Transpose {
    pub src: *const f32,
    pub ld_src: usize,
    pub dst: *mut f32,
    pub ld_dst: usize,
    pub columns: usize,
}

impl Task for Transpose {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        for column in (0..self.columns).step_by(S::LANES) {
            for row in (0..16).step_by(S::LANES) {
                S::transpose(
                    self.src.add(row * self.ld_src + column),
                    self.ld_src,
                    self.dst.add(column * self.ld_dst + row),
                    self.ld_dst,
                );
            }
        }
    }
}
