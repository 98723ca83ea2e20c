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
use crate::dtype::{self, DType};
use crate::error::{Error, Result};
use crate::problem::{Checked, LogBase, MergeArgs, MergeStatesArgs, MergeVarlenArgs};
use crate::tensor::Tensor;

/// Rows per piece of work.
const ROWS_PER_PIECE: usize = 64;

/// Columns that are summed at a time; rows may have any number.
const COLUMNS: usize = 256;

/// States that are summed at a time.
const STATES: usize = 16;

/// The states that a merge reads.
trait States: Sync {
    /// Of all rows.
    fn dtype(&self) -> DType;

    /// How many a token has.
    fn count(&self, token: i64) -> usize;

    /// The address of a state's values, and its lse.
    fn state(&self, token: i64, head: i64, state: usize) -> (i64, f32);
}

/// Two tensors, b before a: every token has it, while the last ones may be without a.
struct Two<'a>(&'a MergeArgs);

impl States for Two<'_> {
    fn dtype(&self) -> DType {
        self.0.v_a.dtype()
    }

    fn count(&self, token: i64) -> usize {
        if token < self.0.num_tokens_with_a() {
            2
        } else {
            1
        }
    }

    fn state(&self, token: i64, head: i64, state: usize) -> (i64, f32) {
        let args = self.0;
        let (v, s) = [(&args.v_b, &args.s_b), (&args.v_a, &args.s_a)][state];
        (address(v, &[token, head]), s.get(&[token, head]))
    }
}

/// As many for each token, in a dimension of their own.
struct Many<'a>(&'a MergeStatesArgs);

impl States for Many<'_> {
    fn dtype(&self) -> DType {
        self.0.v.dtype()
    }

    fn count(&self, _: i64) -> usize {
        self.0.v.extent(1) as usize
    }

    fn state(&self, token: i64, head: i64, state: usize) -> (i64, f32) {
        let at = [token, state as i64, head];
        (address(&self.0.v, &at), self.0.s.get(&at))
    }
}

/// One token's after another's.
struct Varlen<'a> {
    args: &'a MergeVarlenArgs,
    indptr: &'a [i32],
}

impl States for Varlen<'_> {
    fn dtype(&self) -> DType {
        self.args.v.dtype()
    }

    fn count(&self, token: i64) -> usize {
        let token = token as usize;
        (self.indptr[token + 1] - self.indptr[token]) as usize
    }

    fn state(&self, token: i64, head: i64, state: usize) -> (i64, f32) {
        let at = [i64::from(self.indptr[token as usize]) + state as i64, head];
        (address(&self.args.v, &at), self.args.s.get(&at))
    }
}

/// The states of all rows, and where their merges are written.
struct Merge<'a, S> {
    kernels: &'a Kernels,
    states: S,
    v_out: Tensor,
    s_out: Option<Tensor>,
    base: LogBase,
    o_scale: f32,
}

/// Merges two states per row.
pub fn merge(pool: &Pool, kernels: &Kernels, args: &Checked<MergeArgs>) {
    let mask = args.mask.as_ref().and_then(Tensor::as_bytes);
    let merge = Merge {
        kernels,
        states: Two(args),
        v_out: args.v_out,
        s_out: args.s_out,
        base: args.lse_base,
        o_scale: args.o_scale,
    };
    merge.all(pool, |token| mask.is_none_or(|mask| mask[token] != 0));
}

/// Merges n states per row.
pub fn merge_states(pool: &Pool, kernels: &Kernels, args: &Checked<MergeStatesArgs>) {
    let merge = Merge {
        kernels,
        states: Many(args),
        v_out: args.v_out,
        s_out: args.s_out,
        base: args.lse_base,
        o_scale: args.o_scale,
    };
    merge.all(pool, |_| true);
}

/// Merges as many states per row as its token has.
pub fn merge_varlen(pool: &Pool, kernels: &Kernels, args: &Checked<MergeVarlenArgs>) -> Result<()> {
    let Some(indptr) = args.indptr.as_i32() else {
        return Err(Error::Internal(
            "indptr passed its checks and holds no host integers".into(),
        ));
    };
    let merge = Merge {
        kernels,
        states: Varlen { args, indptr },
        v_out: args.v_out,
        s_out: args.s_out,
        base: args.lse_base,
        o_scale: args.o_scale,
    };
    merge.all(pool, |_| true);
    Ok(())
}

/// Address of the row at the leading indices of `tensor`.
fn address(tensor: &Tensor, index: &[i64]) -> i64 {
    let offset: i64 = index.iter().zip(tensor.strides()).map(|(i, s)| i * s).sum();
    tensor.address() as i64 + offset * tensor.dtype().size() as i64
}

impl<S: States> Merge<'_, S> {
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

    /// The lse of a state; -inf for an empty one.
    fn lse(&self, token: i64, head: i64, state: usize) -> f32 {
        let lse = self.states.state(token, head, state).1;
        if lse < f32::INFINITY {
            lse
        } else {
            f32::NEG_INFINITY
        }
    }

    fn row(&self, token: i64, head: i64) {
        let states = 0..self.states.count(token);
        let (to_base_2, from_base_2) = match self.base {
            LogBase::E => (std::f32::consts::LOG2_E, std::f32::consts::LN_2),
            LogBase::Two => (1.0, 1.0),
        };
        let lse = |state| self.lse(token, head, state);
        let max = states.clone().map(lse).fold(f32::NEG_INFINITY, f32::max);
        let weight = |state| match max == f32::NEG_INFINITY {
            true => 0.0,
            false => ((lse(state) - max) * to_base_2).exp2(),
        };
        let sum: f32 = states.map(weight).sum();
        let factor = if sum > 0.0 { 1.0 / sum } else { 0.0 };
        // 1 unless the output is fp8.
        let factor = factor / self.o_scale;
        let dim = self.v_out.extent(2) as usize;
        for first in (0..dim).step_by(COLUMNS) {
            let columns = COLUMNS.min(dim - first);
            self.columns(token, head, first, columns, &weight, factor);
        }
        if let Some(s_out) = &self.s_out {
            let of_sum = if sum > 0.0 { sum.log2() } else { 0.0 };
            s_out.set(&[token, head], max + of_sum * from_base_2);
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
        let skipped = (first * self.states.dtype().size()) as i64;
        let count = self.states.count(token);
        for state in 0..count {
            weights[n] = weight(state);
            rows[n] = self.states.state(token, head, state).0 + skipped;
            n += usize::from(weights[n] > 0.0);
            if n == STATES || state + 1 == count {
                self.add(&weights[..n], &rows[..n], columns, &mut total);
                n = 0;
            }
        }
        let dtype = self.v_out.dtype();
        let out = address(&self.v_out, &[token, head]) as usize + first * dtype.size();
        let whole = columns / 8 * 8;
        let store = Store {
            src: total.as_ptr(),
            factor,
            dst: out as *mut u8,
            dim: whole,
        };
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
        let dtype = self.states.dtype();
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
