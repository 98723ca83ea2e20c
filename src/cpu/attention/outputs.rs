//! The end of an item: row sums, sinks, scales and lse are applied and the outputs stored. Where the keys of the
//! rows were split, partial results are stored instead.
#![allow(unsafe_code)]

use super::item::Item;
use super::run::Run;
use crate::cpu::kernels::convert::Store;
use crate::dtype::{self, DType};
use crate::problem::{LogBase, NO_PARTIAL};
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

/// Columns of a row that are added at a time; rows may have any number.
const COLUMNS: usize = 128;

/// What a row's weighted sum of values is multiplied by, and what it came to before the run.
#[derive(Debug, Clone, Copy, Default)]
struct Weights {
    values: f32,
    sink: f32,
}

impl Run<'_> {
    /// Stores rows of a KV head: outputs, or partial results where the keys were split. `o`, `max` and `sum` begin
    /// with the first of `rows`.
    pub fn store_rows(
        &self,
        item: &Item<'_>,
        head: usize,
        rows: Range<usize>,
        o: &[f32],
        max: &[f32],
        sum: &[f32],
    ) {
        for (i, row) in rows.enumerate() {
            let (token, qo_head) = self.token_and_head(item, head, row);
            let values = &o[i * self.shape.ld_vo..][..self.shape.ld_vo];
            if item.partial == NO_PARTIAL {
                let v_scale = self.v_scales.of_head(item.request, head);
                self.output(token, qo_head, values, max[i], sum[i], v_scale);
            } else {
                let at = item.partial as usize + (token - item.token) as usize;
                self.partial(
                    at * self.shape.num_qo_heads + qo_head,
                    values,
                    max[i],
                    sum[i],
                    self.v_scales.of_part(item.request, head),
                );
            }
        }
    }

    fn partial(&self, at: usize, values: &[f32], max: f32, sum: f32, v_scale: f32) {
        let empty = saw_nothing(max, sum);
        let store = Store {
            src: values.as_ptr(),
            factor: if empty { 0.0 } else { v_scale / sum },
            dst: self
                .plan
                .partial_o
                .wrapping_add(at * self.shape.ld_vo)
                .cast(),
            dim: self.shape.ld_vo,
        };
        // SAFETY: plan checked that the item's partial rows lie in the workspace, and no other item has
        // them.
        unsafe {
            self.kernels.store[DType::F32 as usize](&store);
            let lse = if empty { max } else { max + sum.log2() };
            *self.plan.partial_lse.add(at) = lse;
        }
    }

    /// Stores o and lse of a row. `max` and `sum` are in base 2. `v_scale` is what of `v_scales` its values lack.
    pub fn output(
        &self,
        token: i64,
        head: usize,
        values: &[f32],
        max: f32,
        sum: f32,
        v_scale: f32,
    ) {
        let weights = self.row_weights(token, head, max, sum, v_scale);
        let store = |src: &[f32], factor, first: usize| {
            let dst = self.o.at(token, head);
            let store = Store {
                src: src.as_ptr(),
                factor,
                dst: dst.wrapping_add(first * self.o_dtype.size()),
                dim: src.len(),
            };
            // SAFETY: token and head are the batch's, for which o was checked; rows of other items are others.
            unsafe { self.kernels.store[self.o_dtype as usize](&store) };
        };
        let values = &values[..self.shape.dim_vo];
        let Some(before) = self.before.as_ref().filter(|_| weights.sink > 0.0) else {
            return store(values, weights.values, 0);
        };
        for (block, values) in values.chunks(COLUMNS).enumerate() {
            let first = block * COLUMNS;
            let mut row = [0.0; COLUMNS];
            let row = &mut row[..values.len()];
            before.copy(token, head, first, row);
            for (x, value) in row.iter_mut().zip(values) {
                *x = value * weights.values + *x * weights.sink;
            }
            store(row, 1.0, first);
        }
    }

    /// A logit that has no key, in base 2: the sink, or what the row came to before the run.
    fn sink(&self, token: i64, head: usize) -> f32 {
        match (&self.before, self.sinks) {
            (Some(before), _) => before.take_lse(token, head),
            (None, Some(sinks)) => sinks[head] * LOG2_E,
            (None, None) => f32::NEG_INFINITY,
        }
    }

    /// Stores the lse of a row. Returns the factors that turn its weighted sum of values, and what would be the sink's, into its
    /// output. `v_scale` is what of `v_scales` the sum lacks.
    fn row_weights(&self, token: i64, head: usize, max: f32, sum: f32, v_scale: f32) -> Weights {
        let sink = self.sink(token, head);
        let top = max.max(sink);
        let empty = saw_nothing(top, sum);
        let (keep, of_sink, total) = if empty {
            (0.0, 0.0, 0.0)
        } else if sink == f32::NEG_INFINITY {
            (1.0, 0.0, sum)
        } else {
            let (keep, of_sink) = ((max - top).exp2(), (sink - top).exp2());
            (keep, of_sink, sum * keep + of_sink)
        };
        if let Some((lse, dtype, base)) = &self.lse {
            let value = if empty { top } else { top + total.log2() };
            let value = match base {
                LogBase::E => value * LN_2,
                LogBase::Two => value,
            };
            // SAFETY: as in `output`, of lse.
            unsafe { dtype::store(lse.at(token, head), *dtype, 0, value) };
        }
        if empty {
            return Weights::default();
        }
        Weights {
            values: keep / total * (self.v_factor * v_scale),
            sink: of_sink / total,
        }
    }

    /// Whether the outputs of an item are bf16 and are written directly.
    pub fn stores_bf16(&self, item: &Item<'_>) -> bool {
        item.partial == NO_PARTIAL && self.o_dtype == DType::BF16 && self.before.is_none()
    }

    /// Stores the lse of rows of a KV head, and fills in the factor of each. `max` and `sum` begin with the first of
    /// `rows`.
    pub fn row_factors(
        &self,
        item: &Item<'_>,
        head: usize,
        rows: Range<usize>,
        max: &[f32],
        sum: &[f32],
        factors: &mut [f32],
    ) {
        for (i, row) in rows.enumerate() {
            let (token, qo_head) = self.token_and_head(item, head, row);
            let v_scale = self.v_scales.of_head(item.request, head);
            factors[i] = self
                .row_weights(token, qo_head, max[i], sum[i], v_scale)
                .values;
        }
    }

    /// Stores finished bf16 rows of a KV head, `ld_vo` apart, where [`Run::stores_bf16`].
    pub fn store_bf16(&self, item: &Item<'_>, head: usize, rows: Range<usize>, values: &[u16]) {
        for (row, values) in rows.zip(values.chunks_exact(self.shape.ld_vo)) {
            let (token, qo_head) = self.token_and_head(item, head, row);
            let to = self.o.at(token, qo_head);
            let bytes = 2 * self.shape.dim_vo;
            // SAFETY: as in `output`; `dim_vo` is no more than `ld_vo`.
            unsafe { std::ptr::copy_nonoverlapping(values.as_ptr().cast(), to, bytes) };
        }
    }
}

/// Whether a row saw neither a key nor a sink. The maximum of a row that saw only NaN is -inf too, but its sum is
/// NaN.
fn saw_nothing(max: f32, sum: f32) -> bool {
    max == f32::NEG_INFINITY && !sum.is_nan()
}
