//! The online softmax of a tile whose scores have a row per query row. It decides how many rows one kernel call
//! takes: all of them where they see the same keys, else those of one token. `many_rows_bf16` has transposed scores
//! and a softmax of its own.
#![allow(unsafe_code)]

use super::item::Item;
use super::run::Run;
use super::shape::KEY_TILE;
use crate::cpu::kernels::softmax::Softmax;
use std::ops::Range;

/// Rows of scores, `lds` apart, which become weights in place, and the running state of the rows.
pub struct Scores<'a> {
    pub s: &'a mut [f32],
    pub lds: usize,
    pub limits: &'a mut [f32],
    pub biases: &'a mut [f32],
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub alpha: &'a mut [f32],
}

impl Run<'_> {
    /// The online softmax over `keys` for the rows of `tokens`, head by head.
    pub fn softmax(
        &self,
        item: &Item<'_>,
        heads: Range<usize>,
        tokens: &Range<usize>,
        keys: &Range<i64>,
        rows: Scores<'_>,
    ) {
        let group = self.shape.group;
        let n = (keys.end - keys.start) as usize;
        let count = heads.len() * tokens.len() * group;
        let room = (count - 1) * rows.lds + n.next_multiple_of(32);
        assert!(rows.s.len() >= room && n <= KEY_TILE);
        assert!(rows.limits.len() >= KEY_TILE && rows.biases.len() >= KEY_TILE);
        assert!(rows.max.len() >= count && rows.sum.len() >= count && rows.alpha.len() >= count);
        let mut task = Softmax {
            s: rows.s.as_mut_ptr(),
            lds: rows.lds,
            rows: count,
            n,
            logits: self.logits(item, heads.start),
            low: 0,
            high: n,
            limits: std::ptr::null(),
            slopes: std::ptr::null(),
            biases: std::ptr::null(),
            distance: 0.0,
            max: rows.max.as_mut_ptr(),
            sum: rows.sum.as_mut_ptr(),
            alpha: rows.alpha.as_mut_ptr(),
        };
        let bias = self.bias(item, keys);
        let bent = self.has_slopes() || bias.is_some();
        let alike = !bent && (heads.len() == 1 || self.are_logits_alike());
        if alike && item.sees_all(tokens, keys) {
            // SAFETY: the arrays have room for the rows, as just asserted.
            unsafe { (self.kernels.softmax)(&task) };
            return;
        }
        task.rows = match bias {
            Some(bias) if bias.is_of_heads() => 1,
            _ => group,
        };
        let together = task.rows;
        for head in heads {
            task.logits = self.logits(item, head);
            let slopes = self.slopes(item, head);
            for token in tokens.clone() {
                self.set_visibility(item, token, keys, rows.limits, &mut task);
                for first in (0..group).step_by(together) {
                    task.slopes = slopes.map_or(std::ptr::null(), |all| all[first..].as_ptr());
                    if let Some(bias) = &bias {
                        let row = (token, head * group + first);
                        bias.load(self.kernels, item, row, keys, rows.biases);
                        task.biases = rows.biases.as_ptr();
                    }
                    // SAFETY: as above; the pointers stay within the rows.
                    unsafe { (self.kernels.softmax)(&task) };
                    task.s = task.s.wrapping_add(together * rows.lds);
                    task.max = task.max.wrapping_add(together);
                    task.sum = task.sum.wrapping_add(together);
                    task.alpha = task.alpha.wrapping_add(together);
                }
            }
        }
    }

    /// Fills in which of `keys` a token sees.
    fn set_visibility(
        &self,
        item: &Item<'_>,
        token: usize,
        keys: &Range<i64>,
        limits: &mut [f32],
        task: &mut Softmax,
    ) {
        let row = item.q_start + token as i64;
        let n = task.n as i64;
        task.distance = (keys.start - item.mask.position(row)) as f32;
        if item.mask.has_holes(row, keys) {
            item.mask.limits(row, keys.clone(), limits);
            limits[task.n..task.n.next_multiple_of(32)].fill(f32::NEG_INFINITY);
            task.limits = limits.as_ptr();
            (task.low, task.high) = (0, task.n);
        } else {
            let visible = item.mask.row(row);
            let low = (visible.start - keys.start).clamp(0, n);
            task.limits = std::ptr::null();
            task.low = low as usize;
            task.high = (visible.end - keys.start).clamp(low, n) as usize;
        }
    }
}
