//! The matrix product of attention: `C = alpha · C + A · B`. A is f32 and row-major. The rows of B are a staged f32
//! panel, or value rows where they lie in the cache.
//!
//! It computes q·kᵀ, where B is the transposed panel of keys, and p·v. Blocks of C stay in registers over the whole
//! depth. A is not packed, since its blocks are few rows of a small scratch.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use super::prefetch::Level;
use super::prefetch_rows::{RowPrefetch, RowsWithPrefetch};
use super::rows::Rows;
use super::simd::{Element, Simd, Task, Typed};

/// `c[r][0..columns] = alpha[r] · c[r] + Σ_k a[r][k] · b[k][0..columns]`.
#[derive(Clone, Copy)]
pub struct Product<B> {
    pub a: *const f32,
    pub lda: usize,
    pub rows: usize,
    pub depth: usize,
    pub b: B,
    /// A multiple of 8; `c` has room for the next multiple of 16.
    pub columns: usize,
    pub c: *mut f32,
    pub ldc: usize,
    /// One factor per row; null: `c` is only written.
    pub alpha: *const f32,
}

/// An f32 matrix with `ld` elements from row to row.
#[derive(Clone, Copy)]
pub struct Panel {
    pub base: *const f32,
    pub ld: usize,
}

/// A panel, and the rows to prefetch meanwhile.
#[derive(Clone, Copy)]
pub struct PanelWithPrefetch {
    pub panel: Panel,
    pub prefetch: *const RowPrefetch,
    /// Lines to prefetch during one product.
    pub lines: usize,
}

/// Where rows of B come from.
pub trait RowSource: Copy {
    /// Rows of B per prefetch.
    const STEP: usize;

    unsafe fn at(&self, k: usize) -> *const u8;

    /// Lines to prefetch at each of `steps`; 0 where nothing is.
    #[inline(always)]
    unsafe fn lines_per_step(&self, _steps: usize) -> usize {
        0
    }
    #[inline(always)]
    unsafe fn prefetch_lines(&self, _lines: usize, _level: Level) {}
}

impl RowSource for Panel {
    const STEP: usize = 4;

    #[inline(always)]
    unsafe fn at(&self, k: usize) -> *const u8 {
        self.base.add(k * self.ld).cast()
    }
}

impl RowSource for PanelWithPrefetch {
    const STEP: usize = 4;

    #[inline(always)]
    unsafe fn at(&self, k: usize) -> *const u8 {
        self.panel.at(k)
    }
    #[inline(always)]
    unsafe fn lines_per_step(&self, steps: usize) -> usize {
        self.lines.div_ceil(steps)
    }
    #[inline(always)]
    unsafe fn prefetch_lines(&self, lines: usize, level: Level) {
        (*self.prefetch).prefetch_lines(lines, level);
    }
}

impl RowSource for Rows {
    const STEP: usize = 1;

    #[inline(always)]
    unsafe fn at(&self, k: usize) -> *const u8 {
        self.at_row(k)
    }
}

impl RowSource for RowsWithPrefetch {
    const STEP: usize = 1;

    #[inline(always)]
    unsafe fn at(&self, k: usize) -> *const u8 {
        self.rows.at_row(k)
    }
    #[inline(always)]
    unsafe fn lines_per_step(&self, steps: usize) -> usize {
        (*self.prefetch).lines_per_step(steps)
    }
    #[inline(always)]
    unsafe fn prefetch_lines(&self, lines: usize, level: Level) {
        (*self.prefetch).prefetch_lines(lines, level);
    }
}

impl<E: Element, B: RowSource> Task for Typed<E, Product<B>> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let task = &self.0;
        let width = S::STRIP * S::LANES;
        let blocks = task.columns.div_ceil(width) * task.rows.div_ceil(S::BLOCK_ROWS);
        let share = task.b.lines_per_step(blocks * task.depth.div_ceil(B::STEP));
        let mut column = 0;
        while column + width <= task.columns {
            if S::STRIP == 4 {
                strip::<S, E, B, 4, false>(task, column, share);
            } else {
                strip::<S, E, B, 2, false>(task, column, share);
            }
            column += width;
        }
        while column + S::LANES <= task.columns {
            strip::<S, E, B, 1, false>(task, column, share);
            column += S::LANES;
        }
        if column < task.columns {
            strip::<S, E, B, 1, true>(task, column, share);
        }
    }
}

/// All rows of `N` vectors of columns; with `HALF`, of the eight columns that are left.
#[inline(always)]
unsafe fn strip<S: Simd, E: Element, B: RowSource, const N: usize, const HALF: bool>(
    task: &Product<B>,
    column: usize,
    share: usize,
) {
    let mut r = 0;
    while r < task.rows {
        // 8 rows are faster as 4 + 4 than as 6 + 2, and 7 rows as 4 + 2 + 1 than as 6 + 1.
        r += match task.rows - r {
            left if S::BLOCK_ROWS == 6 && (left == 6 || left > 8) => {
                block::<S, E, B, 6, N, HALF>(task, r, column, share)
            }
            left if left >= 4 => block::<S, E, B, 4, N, HALF>(task, r, column, share),
            left if left >= 2 => block::<S, E, B, 2, N, HALF>(task, r, column, share),
            _ => block::<S, E, B, 1, N, HALF>(task, r, column, share),
        };
    }
}

#[inline(always)]
unsafe fn block<
    S: Simd,
    E: Element,
    B: RowSource,
    const R: usize,
    const N: usize,
    const HALF: bool,
>(
    task: &Product<B>,
    row: usize,
    column: usize,
    share: usize,
) -> usize {
    let mut sums = [[S::splat(0.0); N]; R];
    let c = task.c.add(row * task.ldc + column);
    if !task.alpha.is_null() {
        for r in 0..R {
            let alpha = S::splat(*task.alpha.add(row + r));
            for n in 0..N {
                sums[r][n] = S::mul(alpha, S::load(c.add(r * task.ldc + n * S::LANES)));
            }
        }
    }
    let mut a: [*const f32; R] = std::array::from_fn(|r| task.a.wrapping_add((row + r) * task.lda));
    let mut k = 0;
    while k + B::STEP <= task.depth {
        task.b.prefetch_lines(share, S::LEVEL);
        for u in 0..B::STEP {
            let b = task.b.at(k + u).add(column * E::SIZE);
            step::<S, E, R, N, HALF>(a.map(|a| a.wrapping_add(u)), b, &mut sums);
        }
        a = a.map(|a| a.wrapping_add(B::STEP));
        k += B::STEP;
    }
    while k < task.depth {
        let b = task.b.at(k).add(column * E::SIZE);
        step::<S, E, R, N, HALF>(a, b, &mut sums);
        a = a.map(|a| a.wrapping_add(1));
        k += 1;
    }
    for r in 0..R {
        for n in 0..N {
            S::store(c.add(r * task.ldc + n * S::LANES), sums[r][n]);
        }
    }
    R
}

/// Adds a row of B, times one element of each row of A.
#[inline(always)]
unsafe fn step<S: Simd, E: Element, const R: usize, const N: usize, const HALF: bool>(
    a: [*const f32; R],
    b: *const u8,
    sums: &mut [[S::V; N]; R],
) {
    let mut x = [S::splat(0.0); N];
    for n in 0..N {
        x[n] = if HALF {
            E::load8::<S>(b)
        } else {
            E::load::<S>(b.add(n * S::LANES * E::SIZE))
        };
    }
    for r in 0..R {
        let a = S::splat(*a[r]);
        for n in 0..N {
            sums[r][n] = S::fma(a, x[n], sums[r][n]);
        }
    }
}
