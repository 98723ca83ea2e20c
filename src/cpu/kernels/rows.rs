//! The kernels that touch key and value rows where they lie in the cache, in any element type: dot
//! products for few query rows, weighted sums, staging as f32, and storing rows.
//!
//! Rows are given by offsets, so a kernel knows nothing of pages, layouts or strides.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use super::prefetch::Ahead;
use super::simd::{E4m3, E5m2, Element, Simd, Task};
use std::marker::PhantomData;
use std::ops::Range;

/// Arguments of a kernel that is compiled per element type.
#[derive(Clone, Copy)]
pub struct Of<E, A>(pub A, pub PhantomData<E>);

/// Rows in memory: row `j` starts at `base + offsets[j]`, in bytes.
#[derive(Clone, Copy)]
pub struct Rows {
    pub base: *const u8,
    pub offsets: *const i64,
    pub count: usize,
}

impl Rows {
    /// The rows from `first` on, if there are so many.
    pub fn skip(&self, first: usize) -> Rows {
        let first = first.min(self.count);
        Rows {
            base: self.base,
            offsets: self.offsets.wrapping_add(first),
            count: self.count - first,
        }
    }

    /// Some of the rows.
    pub fn part(&self, range: Range<usize>) -> Rows {
        let mut rows = self.skip(range.start);
        rows.count = rows.count.min(range.len());
        rows
    }

    /// Start of row `j`. Rows of a merge lie in several tensors and have no base: the offset may leave
    /// every allocation.
    ///
    /// # Safety
    /// `j` must be below `count`.
    #[inline(always)]
    pub unsafe fn at_row(&self, j: usize) -> *const u8 {
        self.base.wrapping_offset(*self.offsets.add(j) as isize)
    }
}

/// Rows in the cache, read once, and what to ask for meanwhile.
#[derive(Clone, Copy)]
pub struct Streamed {
    pub rows: Rows,
    pub ahead: *const Ahead,
}

/// Puts query rows, f32 and padded with zeros to a multiple of 16, into the order that [`Dot`] reads, in
/// place. They hold values of the keys' type, unless that is fp8.
#[derive(Clone, Copy)]
pub struct Queries {
    pub q: *mut f32,
    /// A multiple of 32.
    pub ldq: usize,
    pub rows: usize,
    pub dim: usize,
}

/// [`Queries`] where `Dot` reads them as they are.
///
/// # Safety
/// None needed; the type is that of the kernels.
pub unsafe fn leave_queries(_: &Queries) {}

/// `s[r][j] = q[r] · k[j]`. `q` went through [`Queries`]; `s` rows have room for a multiple of 16.
#[derive(Clone, Copy)]
pub struct Dot {
    pub q: *const f32,
    pub ldq: usize,
    pub rows: usize,
    pub k: Streamed,
    /// A multiple of 8.
    pub dim: usize,
    pub s: *mut f32,
    pub lds: usize,
}

impl<E: Element> Task for Of<E, Dot> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let task = &self.0;
        let k = task.k.rows;
        let blocks = k.count.div_ceil(4) * task.rows.div_ceil(S::DOT_ROWS);
        let share = (*task.k.ahead).share(blocks * task.dim.div_ceil(S::LANES));
        for key in (0..k.count).step_by(4) {
            // Past the end the last row stands in; its scores land in padding.
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
        (*task.k.ahead).ask(share, S::LEVEL);
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

/// Copies rows to f32, split in strips of columns: element `c` of row `j` lands at
/// `dst[(c / width) · strip + j · width + c % width]`. Columns are padded with zeros to a multiple of
/// 16. Returns whether every element is finite.
#[derive(Clone, Copy)]
pub struct Stage {
    pub rows: Rows,
    /// A multiple of 8.
    pub dim: usize,
    pub dst: *mut f32,
    /// A multiple of 16.
    pub width: usize,
    pub strip: usize,
}

impl<E: Element> Task for Of<E, Stage> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) -> bool {
        let task = &self.0;
        let zero = S::splat(0.0);
        // x · 0 is 0 for finite x and NaN otherwise.
        let mut check = zero;
        for j in 0..task.rows.count {
            let row = task.rows.at_row(j);
            for c in (0..task.dim.next_multiple_of(16)).step_by(S::LANES) {
                let x = columns::<S, E>(row, c, task.dim);
                check = S::fma(x, zero, check);
                S::store(task.at(j, c), x);
            }
        }
        S::sum(check) == 0.0
    }
}

/// A vector from column `c` of a row of `dim` elements, a multiple of 8, on; zeros where the row has ended.
#[inline(always)]
pub unsafe fn columns<S: Simd, E: Element>(row: *const u8, c: usize, dim: usize) -> S::V {
    if c + S::LANES <= dim {
        E::load::<S>(row.add(c * E::SIZE))
    } else if c < dim {
        E::load8::<S>(row.add(c * E::SIZE))
    } else {
        S::splat(0.0)
    }
}

impl Stage {
    #[inline(always)]
    unsafe fn at(&self, j: usize, c: usize) -> *mut f32 {
        self.dst
            .add(c / self.width * self.strip + j * self.width + c % self.width)
    }
}

/// Stores `src · factor` as `dim` elements.
#[derive(Clone, Copy)]
pub struct Store {
    pub src: *const f32,
    pub factor: f32,
    pub dst: *mut u8,
    /// A multiple of 8; `src` is readable up to the next multiple of 16.
    pub dim: usize,
}

impl<E: Element> Task for Of<E, Store> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let task = &self.0;
        let factor = S::splat(task.factor);
        let mut d = 0;
        while d + S::LANES <= task.dim {
            let x = S::mul(S::load(task.src.add(d)), factor);
            E::store::<S>(task.dst.add(d * E::SIZE), x);
            d += S::LANES;
        }
        if d < task.dim {
            let x = S::mul(S::load(task.src.add(d)), factor);
            E::store8::<S>(task.dst.add(d * E::SIZE), x);
        }
    }
}

/// Stores `src / divisor` as fp8.
#[derive(Clone, Copy)]
pub struct Quantise {
    pub src: *const u8,
    pub divisor: f32,
    pub dst: *mut u8,
    /// A multiple of 8.
    pub dim: usize,
    /// e5m2 instead of e4m3.
    pub e5m2: bool,
}

impl<E: Element> Task for Of<E, Quantise> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) {
        let task = &self.0;
        let divisor = S::splat(task.divisor);
        let mut d = 0;
        while d < task.dim {
            let (src, dst) = (task.src.add(d * E::SIZE), task.dst.add(d));
            if d + S::LANES <= task.dim {
                let x = S::div(E::load::<S>(src), divisor);
                if task.e5m2 {
                    S::store_e5m2(dst, x);
                } else {
                    S::store_e4m3(dst, x);
                }
            } else {
                let x = S::div(E::load8::<S>(src), divisor);
                if task.e5m2 {
                    E5m2::store8::<S>(dst, x);
                } else {
                    E4m3::store8::<S>(dst, x);
                }
            }
            d += S::LANES;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::for_each_isa;
    use crate::dtype::{self, DType};

    const FLOATS: [DType; 5] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::F8E4M3,
        DType::F8E5M2,
    ];

    /// Equal to the bit, or both NaN.
    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
    }

    #[test]
    fn staging_reads_every_bit_pattern_as_dtype_does() {
        // Two-byte patterns cover fp16 and bf16, and with their low bytes fp8.
        let memory: Vec<u16> = (0..=u16::MAX).collect();
        for_each_isa(|isa| {
            for dtype in FLOATS {
                let dim = 2 * memory.len() / dtype.size();
                let mut staged = vec![0f32; dim];
                let task = Stage {
                    rows: Rows {
                        base: memory.as_ptr().cast(),
                        offsets: &0,
                        count: 1,
                    },
                    dim,
                    dst: staged.as_mut_ptr(),
                    width: dim,
                    strip: 0,
                };
                // SAFETY: the row is `memory`, and `staged` holds it.
                let finite = unsafe { isa.kernels().stage[dtype as usize](&task) };
                assert!(!finite, "{isa:?} {dtype}: there are NaN patterns");
                for (i, &got) in staged.iter().enumerate() {
                    // SAFETY: within `memory`.
                    let want = unsafe { dtype::load(memory.as_ptr().cast(), dtype, i as isize) };
                    assert!(same(got, want), "{isa:?} {dtype} {i:#x}: {got} for {want}");
                }
            }
        });
    }

    #[test]
    fn storing_rounds_as_dtype_does() {
        // A step through all bit patterns that meets ties, denormals, infinities and NaN.
        let ties = (0..1u32 << 12).map(|i| i << 20 | 0x8000);
        let small = (0..1u32 << 12).map(|i| 0x3000_0000 + i * 0x3_8000);
        let other = (0..1u32 << 16).map(|i| i.wrapping_mul(65_599));
        let mut values: Vec<f32> = ties.chain(small).chain(other).map(f32::from_bits).collect();
        values.extend([0.0, -0.0, 448.0, 464.0, 1e9, -1e9, f32::NAN, f32::INFINITY].repeat(2));
        for_each_isa(|isa| {
            for dtype in FLOATS {
                let mut got = vec![0u8; values.len() * dtype.size()];
                let mut want = got.clone();
                let task = Store {
                    src: values.as_ptr(),
                    factor: 1.0,
                    dst: got.as_mut_ptr(),
                    dim: values.len(),
                };
                // SAFETY: both sides hold `dim` elements.
                unsafe { isa.kernels().store[dtype as usize](&task) };
                for (i, &value) in values.iter().enumerate() {
                    // SAFETY: within the vectors.
                    let (got, want) = unsafe {
                        dtype::store(want.as_mut_ptr(), dtype, i as isize, value);
                        let load = |from: &[u8]| dtype::load(from.as_ptr(), dtype, i as isize);
                        (load(&got), load(&want))
                    };
                    assert!(
                        same(got, want),
                        "{isa:?} {dtype} {value:e}: {got} for {want}"
                    );
                }
            }
        });
    }
}
