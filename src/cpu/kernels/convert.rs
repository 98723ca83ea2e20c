//! Conversions between element types, row by row: cache or query rows to f32 ([`Stage`]), f32 to the output type
//! ([`Store`]), and new rows to fp8 ([`Quantise`]).
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]

use super::rows::Rows;
use super::simd::{E4m3, E5m2, Element, Simd, Task, Typed, load_columns};

/// Converts rows to f32, cut into strips of columns: element `c` of row `j` lands at `dst[(c / width) · strip + j ·
/// width + c % width]`. Columns are padded with zeros to a multiple of 16. Returns whether every element is finite.
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

impl<E: Element> Task for Typed<E, Stage> {
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
                let x = load_columns::<S, E>(row, c, task.dim);
                check = S::fma(x, zero, check);
                S::store(task.at(j, c), x);
            }
        }
        S::sum(check) == 0.0
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

impl<E: Element> Task for Typed<E, Store> {
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

impl<E: Element> Task for Typed<E, Quantise> {
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
