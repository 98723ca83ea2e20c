//! The online softmax of a tile whose scores have a row per query row: which kernel calls it takes, as heads and
//! tokens differ in what they see. The walk by blocks of bf16 has its scores transposed and does this itself.
#![allow(unsafe_code)]

use super::item::Item;
use super::run::Run;
use super::shape::KEY_TILE;
use crate::cpu::kernels::softmax::Softmax;
use std::ops::Range;

/// Rows of scores, `lds` apart, that become weights in place, and the rows' running state.
pub struct Scores<'a> {
    pub s: &'a mut [f32],
    pub lds: usize,
    pub limits: &'a mut [f32],
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub alpha: &'a mut [f32],
}

impl Run<'_> {
    /// Online softmax over the scores of the rows of `tokens`, head by head, which hold `keys`.
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
        assert!(rows.s.len() >= room && n <= KEY_TILE && rows.limits.len() >= KEY_TILE);
        assert!(rows.max.len() >= count && rows.sum.len() >= count && rows.alpha.len() >= count);
        let mut task = Softmax {
            s: rows.s.as_mut_ptr(),
            lds: rows.lds,
            rows: count,
            n,
            logits: self.logits(heads.start),
            low: 0,
            high: n,
            limits: std::ptr::null(),
            slopes: std::ptr::null(),
            distance: 0.0,
            max: rows.max.as_mut_ptr(),
            sum: rows.sum.as_mut_ptr(),
            alpha: rows.alpha.as_mut_ptr(),
        };
        let alike = self.slopes.is_none() && (heads.len() == 1 || self.k_scales.len() == 1);
        if alike && item.sees_all(tokens, keys) {
            // SAFETY: the arrays have room for the rows, as just asserted.
            unsafe { (self.kernels.softmax)(&task) };
            return;
        }
        task.rows = group;
        for head in heads {
            task.logits = self.logits(head);
            task.slopes = self.slopes(head).map_or(std::ptr::null(), <[f32]>::as_ptr);
            for token in tokens.clone() {
                self.look(item, token, keys, rows.limits, &mut task);
                // SAFETY: as above; the pointers stay within the rows.
                unsafe { (self.kernels.softmax)(&task) };
                task.s = task.s.wrapping_add(group * rows.lds);
                task.max = task.max.wrapping_add(group);
                task.sum = task.sum.wrapping_add(group);
                task.alpha = task.alpha.wrapping_add(group);
            }
        }
    }

    /// Fills in what one token sees of `keys`.
    fn look(
        &self,
        item: &Item<'_>,
        token: usize,
        keys: &Range<i64>,
        limits: &mut [f32],
        task: &mut Softmax,
    ) {
        let row = item.q_start + token as i64;
        let n = task.n as i64;
        task.distance = (keys.start - item.sight.position(row)) as f32;
        if item.sight.has_holes(row) {
            item.sight.limits(row, keys.clone(), limits);
            limits[task.n..task.n.next_multiple_of(32)].fill(f32::NEG_INFINITY);
            task.limits = limits.as_ptr();
            (task.low, task.high) = (0, task.n);
        } else {
            let seen = item.sight.row(row);
            let low = (seen.start - keys.start).clamp(0, n);
            task.limits = std::ptr::null();
            task.low = low as usize;
            task.high = (seen.end - keys.start).clamp(low, n) as usize;
        }
    }
}
