//! Combining the partial results of rows whose keys were split: the merge of attention states within a run.
#![allow(unsafe_code)]

use super::run::Run;
use super::scratch::Pad;
use super::shape::KEY_TILE;
use crate::cpu::kernels::product::{Panel, Product};
use crate::problem::MergeItem;

impl Run<'_> {
    /// Puts the rows of a split tile together, those of one KV head.
    pub fn merge(&self, merge: &MergeItem, kv_head: usize, pad: &mut Pad<'_>) {
        let first = i64::from(self.plan.qo_indptr[merge.request as usize]);
        let group = self.shape.group;
        for row in 0..merge.q_len as usize {
            for head in kv_head * group..(kv_head + 1) * group {
                let (max, sum) = self.merge_row(merge, row, head, pad);
                let token = first + i64::from(merge.q_start) + row as i64;
                self.output(token, head, &pad.o[..self.shape.ld_vo], max, sum);
            }
        }
    }

    /// `Σ w_c o_c` in `pad.o`, and the maximum and sum of the weights `w_c = 2^(lse_c - max)`.
    fn merge_row(
        &self,
        merge: &MergeItem,
        row: usize,
        head: usize,
        pad: &mut Pad<'_>,
    ) -> (f32, f32) {
        let heads = self.shape.num_qo_heads;
        let chunks = merge.num_chunks as usize;
        let at =
            |c: usize| (merge.partial as usize + c * merge.q_len as usize + row) * heads + head;
        // SAFETY: plan checked that the partial rows of the merge lie in the workspace.
        let lse = |c: usize| unsafe { *self.plan.partial_lse.add(at(c)) };
        let max = (0..chunks).map(lse).fold(f32::NEG_INFINITY, larger);
        let mut sum = 0.0;
        pad.o[..self.shape.ld_vo].fill(0.0);
        if max == f32::NEG_INFINITY {
            return (max, sum);
        }
        for start in (0..chunks).step_by(KEY_TILE) {
            let count = (chunks - start).min(KEY_TILE);
            for (c, weight) in pad.s[..count].iter_mut().enumerate() {
                *weight = (lse(start + c) - max).exp2();
                sum += *weight;
            }
            let product = Product {
                a: pad.s.as_ptr(),
                lda: 0,
                rows: 1,
                depth: count,
                b: Panel {
                    base: self
                        .plan
                        .partial_o
                        .wrapping_add(at(start) * self.shape.ld_vo),
                    ld: merge.q_len as usize * heads * self.shape.ld_vo,
                },
                columns: self.shape.ld_vo,
                c: pad.o.as_mut_ptr(),
                ldc: 0,
                alpha: &1.0,
            };
            // SAFETY: as above; `pad.o` holds a row and `pad.s` the weights.
            unsafe { (self.kernels.product)(&product) };
        }
        (max, sum)
    }
}

/// NaN if either is: what one chunk of a row saw must not be lost.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}
