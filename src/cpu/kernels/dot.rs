//! Scores of few query rows: dot products with key rows where they lie in the cache, in any element type.
//! Many query rows go through `product` over a staged panel instead.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use super::prefetch_rows::RowsWithPrefetch;
use super::simd::{Element, Simd, Task, Typed};

/// Reorders query rows as [`Dot`] reads them, in place. They are f32, padded with zeros to a multiple of 16, and
/// hold values of the type of the keys unless that is fp8.
#[derive(Clone, Copy)]
pub struct PrepareQueries {
    pub q: *mut f32,
    /// A multiple of 32.
    pub ldq: usize,
    pub rows: usize,
    pub dim: usize,
}

/// [`PrepareQueries`] of kernels that read query rows as they are.
///
/// # Safety
/// Always safe to call; the type is that of the table.
pub unsafe fn keep_queries(_: &PrepareQueries) {}

/// `s[r][j] = q[r] · k[j]`. `q` went through [`PrepareQueries`]; `s` rows have room for a multiple of 16.
#[derive(Clone, Copy)]
pub struct Dot {
    pub q: *const f32,
    pub ldq: usize,
    pub rows: usize,
    pub k: RowsWithPrefetch,
    /// A multiple of 8.
    pub dim: usize,
    pub s: *mut f32,
    pub lds: usize,
}

impl<E: Element> Task for Typed<E, Dot> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let task = &self.0;
        let k = task.k.rows;
        let blocks = k.count.div_ceil(4) * task.rows.div_ceil(S::DOT_ROWS);
        let share = (*task.k.prefetch).lines_per_step(blocks * task.dim.div_ceil(S::LANES));
        for key in (0..k.count).step_by(4) {
            // Past the end the last row is read again; its scores land in padding.
            let last = k.count - 1;
            let keys = [
                k.at_row(key),
                k.at_row(last.min(key + 1)),
                k.at_row(last.min(key + 2)),
                k.at_row(last.min(key + 3)),
            ];
            let mut r = 0;
            while S::DOT_ROWS == 4 && r + 4 <= task.rows {
                dot_block::<S, E, 4>(task, r, key, keys, share);
                r += 4;
            }
            while r + 2 <= task.rows {
                dot_block::<S, E, 2>(task, r, key, keys, share);
                r += 2;
            }
            if r < task.rows {
                dot_block::<S, E, 1>(task, r, key, keys, share);
            }
        }
    }
}

#[inline(always)]
unsafe fn dot_block<S: Simd, E: Element, const R: usize>(
    task: &Dot,
    r0: usize,
    key: usize,
    keys: [*const u8; 4],
    share: usize,
) {
    let mut sums = [[S::splat(0.0); 4]; R];
    let q = task.q.add(r0 * task.ldq);
    let mut d = 0;
    while d + S::LANES <= task.dim {
        (*task.k.prefetch).prefetch_lines(share, S::LEVEL);
        let k = [
            E::load::<S>(keys[0].add(d * E::SIZE)),
            E::load::<S>(keys[1].add(d * E::SIZE)),
            E::load::<S>(keys[2].add(d * E::SIZE)),
            E::load::<S>(keys[3].add(d * E::SIZE)),
        ];
        for r in 0..R {
            let q = S::load(q.add(r * task.ldq + d));
            for t in 0..4 {
                sums[r][t] = S::fma(q, k[t], sums[r][t]);
            }
        }
        d += S::LANES;
    }
    if d < task.dim {
        for t in 0..4 {
            let k = E::load8::<S>(keys[t].add(d * E::SIZE));
            for r in 0..R {
                sums[r][t] = S::fma(S::load(q.add(r * task.ldq + d)), k, sums[r][t]);
            }
        }
    }
    for r in 0..R {
        S::store_sums(task.s.add((r0 + r) * task.lds + key), sums[r]);
    }
}
