//! Combining the partial results of rows whose keys were split: the merge of attention states within a run.
#![allow(unsafe_code)]

use super::run::Run;
use super::scratch::Scratch;
use super::shape::KEY_TILE;
use crate::cpu::kernels::product::Product;
use crate::cpu::kernels::rows::Rows;
use crate::dtype::DType;
use crate::problem::CombineItem;

impl Run<'_> {
    /// Combines the partial results of a split row, for one KV head.
    pub fn combine(&self, row: &CombineItem, kv_head: usize, scratch: &mut Scratch<'_>) {
        let group = self.shape.group;
        let parts = &self.plan.partials[row.first as usize..][..row.count as usize];
        for head in kv_head * group..(kv_head + 1) * group {
            let (max, sum) = self.combine_parts(parts, head, scratch);
            let values = &scratch.o[..self.shape.ld_vo];
            let v_scale = self.v_scales.of_parts_together(kv_head);
            self.output(i64::from(row.q_token), head, values, max, sum, v_scale);
        }
    }

    /// `Σ w_c o_c` in `scratch.o`, and the maximum and sum of the weights `w_c = 2^(lse_c - max)`.
    fn combine_parts(&self, parts: &[u32], head: usize, scratch: &mut Scratch<'_>) -> (f32, f32) {
        let at = |part: u32| part as usize * self.shape.num_qo_heads + head;
        // SAFETY: partial rows lie in the workspace, which was sized for them.
        let lse = |part: u32| unsafe { *self.plan.partial_lse.add(at(part)) };
        let max = (parts.iter().map(|&part| lse(part))).fold(f32::NEG_INFINITY, larger);
        let mut sum = 0.0;
        scratch.o[..self.shape.ld_vo].fill(0.0);
        if max == f32::NEG_INFINITY {
            return (max, sum);
        }
        for parts in parts.chunks(KEY_TILE) {
            for (i, &part) in parts.iter().enumerate() {
                scratch.s[i] = (lse(part) - max).exp2();
                sum += scratch.s[i];
                scratch.tile.k_offsets[i] = (at(part) * self.shape.ld_vo * size_of::<f32>()) as i64;
            }
            let product = Product {
                a: scratch.s.as_ptr(),
                lda: 0,
                rows: 1,
                depth: parts.len(),
                b: Rows {
                    base: self.plan.partial_o.cast::<u8>(),
                    offsets: scratch.tile.k_offsets.as_ptr(),
                    count: parts.len(),
                },
                columns: self.shape.ld_vo,
                c: scratch.o.as_mut_ptr(),
                ldc: 0,
                alpha: &1.0,
            };
            // SAFETY: as above; `scratch.o` holds a row and `scratch.s` the weights.
            unsafe { (self.kernels.accumulate[DType::F32 as usize])(&product) };
        }
        (max, sum)
    }
}

/// The larger number; NaN if either is. A NaN in one chunk of a row must not be lost.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}
