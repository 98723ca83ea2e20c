//! The values of a tile, staged as an f32 panel, and the product of attention weights with them. `many_rows` always
//! multiplies so; `few_rows` does where some row does not see every key.
#![allow(unsafe_code)]

use super::run::Run;
use crate::cpu::kernels::convert::Stage;
use crate::cpu::kernels::product::{Panel, Product};
use crate::cpu::kernels::rows::Rows;
use std::ops::Range;

/// Stages values as f32, of a tile of `tile` of them: column `c` of value `j` lands at `panel[c / strip · strip · tile +
/// j · strip + c % strip]`. `rows` begin with value `first`. Returns whether all are finite.
pub fn stage_values(
    run: &Run<'_>,
    rows: Rows,
    (first, tile): (usize, usize),
    panel: &mut [f32],
) -> bool {
    let strip = run.kernels.strip;
    assert!(panel.len() >= run.shape.ld_vo.next_multiple_of(strip) * tile);
    assert!(first + rows.count <= tile);
    let stage = Stage {
        rows,
        dim: run.shape.dim_vo,
        dst: panel[first * strip..].as_mut_ptr(),
        width: strip,
        strip: strip * tile,
    };
    // SAFETY: the values were located within the cache; the panel has room for a tile.
    unsafe { run.kernels.stage[run.row_dtype as usize](&stage) }
}

/// Rows of weights, `ldp` apart.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    pub p: &'a [f32],
    pub ldp: usize,
    pub rows: usize,
}

/// The staged values of a tile.
pub struct Values {
    pub panel: *const f32,
    /// Values that the panel has room for.
    pub tile: usize,
    pub finite: bool,
}

impl Values {
    /// Stages values, at most a tile.
    pub fn stage(run: &Run<'_>, rows: Rows, tile: usize, panel: &mut [f32]) -> Values {
        Values {
            finite: stage_values(run, rows, (0, tile), panel),
            tile,
            panel: panel.as_ptr(),
        }
    }

    /// `o = alpha · o + p · v` over the values `visible`; without `alpha`, `o = p · v`. Column 0 of `p` belongs to
    /// the first of them.
    pub fn accumulate(
        &self,
        run: &Run<'_>,
        p: Weights<'_>,
        visible: Range<usize>,
        o: &mut [f32],
        alpha: Option<&[f32]>,
    ) {
        let ld = run.shape.ld_vo;
        assert!(o.len() >= p.rows * ld && alpha.is_none_or(|alpha| alpha.len() >= p.rows));
        assert!(p.p.len() >= (p.rows - 1) * p.ldp + visible.len());
        if self.finite {
            self.product(run, p, visible, o, alpha);
            return;
        }
        // 0 · NaN is NaN, so only values with a weight are added.
        for row in 0..p.rows {
            let (weights, o) = (&p.p[row * p.ldp..], &mut o[row * ld..]);
            let one = |p| Weights { p, ldp: 0, rows: 1 };
            let alpha = alpha.map(|alpha| &alpha[row..]);
            self.product(run, one(weights), visible.start..visible.start, o, alpha);
            for j in visible.clone() {
                let weight = &weights[j - visible.start..];
                if weight[0] != 0.0 {
                    self.product(run, one(weight), j..j + 1, o, Some(&[1.0]));
                }
            }
        }
    }

    fn product(
        &self,
        run: &Run<'_>,
        p: Weights<'_>,
        visible: Range<usize>,
        o: &mut [f32],
        alpha: Option<&[f32]>,
    ) {
        let (ld, strip) = (run.shape.ld_vo, run.kernels.strip);
        for column in (0..ld).step_by(strip) {
            let product = Product {
                a: p.p.as_ptr(),
                lda: p.ldp,
                rows: p.rows,
                depth: visible.len(),
                b: Panel {
                    base: self
                        .panel
                        .wrapping_add(column * self.tile + visible.start * strip),
                    ld: strip,
                },
                columns: strip.min(ld - column),
                c: o[column..].as_mut_ptr(),
                ldc: ld,
                alpha: alpha.map_or(std::ptr::null(), <[f32]>::as_ptr),
            };
            // SAFETY: `accumulate` checked the room; `visible` lies within the staged tile.
            unsafe { (run.kernels.product)(&product) };
        }
    }
}
