//! Merging attention states: `Σ w_i v_i / Σ w_i` with `w_i = exp(lse_i - max)`. The partial results of split rows
//! are combined elsewhere (`attention::combine`).
//!
//! An lse of -inf marks an empty state. So do +inf and NaN, which other libraries use. The values of an empty state
//! are never read. Outputs may be the inputs themselves.
#![allow(unsafe_code)]

use super::threads::Pool;
use crate::cpu::kernels::convert::Store;
use crate::cpu::kernels::product::Product;
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::table::Kernels;
use crate::dtype;
use crate::problem::{Checked, LogBase, MergeArgs, MergeStatesArgs};
use crate::tensor::Tensor;

/// Rows per piece of work.
const ROWS_PER_PIECE: usize = 64;

/// Columns that are summed at a time; rows may have any number.
const COLUMNS: usize = 256;

/// States that are summed at a time.
const STATES: usize = 16;

/// The states of a row, and where their merge is written.
struct Merge<'a, F> {
    kernels: &'a Kernels,
    v_out: Tensor,
    s_out: Option<Tensor>,
    base: LogBase,
    count: usize,
    /// Maps (token, head, state) to the address of its values and its lse.
    state: F,
}

/// Merges two states per row.
pub fn merge(pool: &Pool, kernels: &Kernels, args: &Checked<MergeArgs>) {
    let mask = args.mask.as_ref().and_then(Tensor::as_bytes);
    let merge = Merge {
        kernels,
        v_out: args.v_out,
        s_out: args.s_out,
        base: args.lse_base,
        count: 2,
        state: |token: i64, head: i64, state: usize| {
            let (v, s) = [(&args.v_a, &args.s_a), (&args.v_b, &args.s_b)][state];
            (address(v, &[token, head]), s.get(&[token, head]))
        },
    };
    merge.all(pool, |token| mask.is_none_or(|mask| mask[token] != 0));
}

/// Merges n states per row.
pub fn merge_states(pool: &Pool, kernels: &Kernels, args: &Checked<MergeStatesArgs>) {
    let merge = Merge {
        kernels,
        v_out: args.v_out,
        s_out: args.s_out,
        base: args.lse_base,
        count: args.v.extent(1) as usize,
        state: |token: i64, head: i64, state: usize| {
            let n = state as i64;
            (
                address(&args.v, &[token, n, head]),
                args.s.get(&[token, n, head]),
            )
        },
    };
    merge.all(pool, |_| true);
}

/// Address of the row at the leading indices of `tensor`.
fn address(tensor: &Tensor, index: &[i64]) -> i64 {
    let offset: i64 = index.iter().zip(tensor.strides()).map(|(i, s)| i * s).sum();
    tensor.address() as i64 + offset * tensor.dtype().size() as i64
}

impl<F: Fn(i64, i64, usize) -> (i64, f32) + Sync> Merge<'_, F> {
    fn all(&self, pool: &Pool, wanted: impl Fn(usize) -> bool + Sync) {
        let heads = self.v_out.extent(1) as usize;
        let rows = self.v_out.extent(0) as usize * heads;
        pool.turn()
            .for_each(rows.div_ceil(ROWS_PER_PIECE), &|_, piece| {
                let first = piece * ROWS_PER_PIECE;
                for row in first..rows.min(first + ROWS_PER_PIECE) {
                    if wanted(row / heads) {
                        self.row((row / heads) as i64, (row % heads) as i64);
                    }
                }
            });
    }

    /// The lse of a state in base 2; -inf for an empty one.
    fn lse(&self, token: i64, head: i64, state: usize) -> f32 {
        let lse = (self.state)(token, head, state).1;
        match self.base {
            _ if lse.is_nan() || lse == f32::INFINITY => f32::NEG_INFINITY,
            LogBase::E => lse * std::f32::consts::LOG2_E,
            LogBase::Two => lse,
        }
    }

    fn row(&self, token: i64, head: i64) {
        let lse = |state| self.lse(token, head, state);
        let max = (0..self.count).map(lse).fold(f32::NEG_INFINITY, f32::max);
        let weight = |state| match max == f32::NEG_INFINITY {
            true => 0.0,
            false => (lse(state) - max).exp2(),
        };
        let sum: f32 = (0..self.count).map(weight).sum();
        let factor = if sum > 0.0 { 1.0 / sum } else { 0.0 };
        let dim = self.v_out.extent(2) as usize;
        for first in (0..dim).step_by(COLUMNS) {
            let columns = COLUMNS.min(dim - first);
            self.columns(token, head, first, columns, &weight, factor);
        }
        if let Some(s_out) = &self.s_out {
            let merged = max + if sum > 0.0 { sum.log2() } else { 0.0 };
            let merged = match self.base {
                LogBase::E => merged * std::f32::consts::LN_2,
                LogBase::Two => merged,
            };
            s_out.set(&[token, head], merged);
        }
    }

    /// Columns `first..first + columns` of a row.
    fn columns(
        &self,
        token: i64,
        head: i64,
        first: usize,
        columns: usize,
        weight: &impl Fn(usize) -> f32,
        factor: f32,
    ) {
        let mut total = [0f32; COLUMNS];
        let (mut weights, mut rows, mut n) = ([0f32; STATES], [0i64; STATES], 0);
        let size = self.v_out.dtype().size();
        for state in 0..self.count {
            weights[n] = weight(state);
            rows[n] = (self.state)(token, head, state).0 + (first * size) as i64;
            n += usize::from(weights[n] > 0.0);
            if n == STATES || state + 1 == self.count {
                self.add(&weights[..n], &rows[..n], columns, &mut total);
                n = 0;
            }
        }
        let out = address(&self.v_out, &[token, head]) as usize + first * size;
        let whole = columns / 8 * 8;
        let store = Store {
            src: total.as_ptr(),
            factor,
            dst: out as *mut u8,
            dim: whole,
        };
        let dtype = self.v_out.dtype();
        // SAFETY: the row is the output's, which was checked; `total` holds its columns.
        unsafe {
            self.kernels.store[dtype as usize](&store);
            for (column, value) in total.iter().enumerate().take(columns).skip(whole) {
                dtype::store(out as *mut u8, dtype, column as isize, value * factor);
            }
        }
    }

    /// `total += Σ weight · row`.
    fn add(&self, weights: &[f32], rows: &[i64], columns: usize, total: &mut [f32; COLUMNS]) {
        let dtype = self.v_out.dtype();
        let whole = columns / 8 * 8;
        let product = Product {
            a: weights.as_ptr(),
            lda: 0,
            rows: 1,
            depth: weights.len(),
            b: Rows {
                base: std::ptr::null(),
                offsets: rows.as_ptr(),
                count: rows.len(),
            },
            columns: whole,
            c: total.as_mut_ptr(),
            ldc: 0,
            alpha: &1.0,
        };
        // SAFETY: the rows are addresses of the inputs' rows, which were checked.
        unsafe {
            self.kernels.accumulate[dtype as usize](&product);
            for (weight, row) in weights.iter().zip(rows) {
                for (column, total) in total.iter_mut().enumerate().take(columns).skip(whole) {
                    *total += weight * dtype::load(*row as *const u8, dtype, column as isize);
                }
            }
        }
    }
}
