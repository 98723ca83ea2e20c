//! The bf16 split: a number becomes a sum of bf16 numbers, its parts, so that products of all types run on AMX. The
//! first part is the nearest bf16 number, the second the one nearest to the rest, and so on. A bf16 number has 8
//! significant bits, so two parts hold a float16 exactly, and three a float32. A product of sums is the sum of the
//! products of the parts, of which the smallest are left out. (Henry, Tang and Heinecke, "Leveraging the bfloat16
//! Artificial Intelligence Datatype For Higher-Precision Computations", 2019; `float_to_bf16x3` in oneMKL.)
//!
//! AMX treats denormals as zero, so parts below 2^-126 are lost.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of `Task::run`, stated on the fields"
)]

use super::rows::Rows;
use super::simd::{Element, Simd, Task, Typed, load_columns};
use crate::dtype::DType;

/// Most parts of a number.
pub const MAX_PARTS: usize = 3;

/// Most products of parts that make up a product of two numbers.
pub const MAX_TERMS: usize = MAX_PARTS * (MAX_PARTS + 1) / 2;

/// Parts of a number of a type. An fp8 number is one bf16 number.
pub fn count(dtype: DType) -> usize {
    match dtype {
        DType::F32 => 3,
        DType::F16 => 2,
        _ => 1,
    }
}

/// The pairs of parts that are multiplied. Each shares a part with the pair before it, so that AMX loads one block
/// per product.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    pairs: [(usize, usize); MAX_TERMS],
    count: usize,
}

impl Terms {
    /// All pairs of parts whose indices add up to less than `end`. Part `i` is smaller than its number by 2^(9 · i),
    /// so the products that are left out are smaller than the whole by 2^(9 · end).
    pub fn new(a_parts: usize, b_parts: usize, end: usize) -> Terms {
        let mut terms = Terms {
            pairs: [(0, 0); MAX_TERMS],
            count: 0,
        };
        let mut b = 0;
        for a in (0..a_parts.min(end)).rev() {
            // `a` falls, so `partners` never does, and `b` stays a partner.
            let partners = b_parts.min(end - a);
            for i in 0..partners {
                terms.pairs[terms.count] = (a, (b + i) % partners);
                terms.count += 1;
            }
            b = terms.pairs[terms.count - 1].1;
        }
        terms
    }

    pub fn pairs(&self) -> &[(usize, usize)] {
        &self.pairs[..self.count]
    }
}

/// Rows in memory that become parts.
#[derive(Clone, Copy)]
pub struct Split {
    pub rows: Rows,
    /// A multiple of 8.
    pub dim: usize,
    pub parts: usize,
    /// Part `i` of column `c` of row `j` lands at `dst[i · stride + j · ld + c]`. Columns from `dim` on are zero.
    pub dst: *mut u16,
    pub stride: usize,
    /// A multiple of 16.
    pub ld: usize,
}

/// Returns whether every element has parts. NaN, infinities and numbers that round to infinity have none.
impl<E: Element> Task for Typed<E, Split> {
    type Output = bool;

    #[inline(always)]
    unsafe fn run<S: Simd>(&self) -> bool {
        let task = &self.0;
        let zero = S::splat(0.0);
        // x · 0 is 0 for finite x and NaN otherwise.
        let mut check = zero;
        for j in 0..task.rows.count {
            let row = task.rows.at_row(j);
            for c in (0..task.ld).step_by(S::LANES) {
                let mut rest = load_columns::<S, E>(row, c, task.dim);
                for part in 0..task.parts {
                    let nearest = S::nearest_bf16(rest);
                    S::store_rounded_bf16(
                        task.dst.add(part * task.stride + j * task.ld + c),
                        nearest,
                    );
                    rest = S::sub(rest, nearest);
                }
                check = S::fma(rest, zero, check);
            }
        }
        S::sum(check) == 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::for_each_isa;
    use half::{bf16, f16};

    const COLUMNS: usize = 1 << 8;

    /// Splits numbers on every instruction set and gives the sums of their parts, or `None` where one has none.
    fn split<T: Copy>(dtype: DType, numbers: &[T], mut see: impl FnMut(Option<Vec<f64>>)) {
        assert_eq!(size_of::<T>(), dtype.size());
        let offsets: Vec<i64> = (0..numbers.len() / COLUMNS)
            .map(|row| (row * COLUMNS * dtype.size()) as i64)
            .collect();
        for_each_isa(|isa| {
            let mut parts = vec![0u16; MAX_PARTS * numbers.len()];
            let task = Split {
                rows: Rows {
                    base: numbers.as_ptr().cast(),
                    offsets: offsets.as_ptr(),
                    count: offsets.len(),
                },
                dim: COLUMNS,
                parts: count(dtype),
                dst: parts.as_mut_ptr(),
                stride: numbers.len(),
                ld: COLUMNS,
            };
            // SAFETY: the rows are `numbers`, and there is room for all parts.
            let done = unsafe { isa.kernels().split[dtype as usize](&task) };
            let part = |i: usize| f64::from(bf16::from_bits(parts[i]).to_f32());
            let sum = |i: usize| (0..MAX_PARTS).map(|l| part(l * numbers.len() + i)).sum();
            see(done.then(|| (0..numbers.len()).map(sum).collect()));
        });
    }

    #[test]
    fn parts_add_up_exactly() {
        let finite = |bits: u16| f16::from_bits(bits).is_finite().then_some(bits);
        let halves: Vec<u16> = (0..=u16::MAX)
            .map(|bits| finite(bits).unwrap_or(0))
            .collect();
        let want: Vec<f64> = halves.iter().map(|&x| f16::from_bits(x).to_f64()).collect();
        split(DType::F16, &halves, |sums| {
            assert_eq!(sums.as_ref(), Some(&want))
        });
        // Exponents from where the least part is no denormal.
        let floats = (0..1u32 << 16).map(|i| {
            let bits = i.wrapping_mul(2_654_435_761);
            f32::from_bits(bits & 0x807f_ffff | ((24 + i % 228) << 23))
        });
        let floats: Vec<f32> = floats.collect();
        let want: Vec<f64> = floats.iter().map(|&x| f64::from(x)).collect();
        split(DType::F32, &floats, |sums| {
            assert_eq!(sums.as_ref(), Some(&want))
        });
    }

    #[test]
    fn what_has_no_parts_is_told() {
        for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            let mut numbers = [1f32; COLUMNS];
            numbers[37] = special;
            split(DType::F32, &numbers, |sums| {
                assert_eq!(sums, None, "{special}")
            });
        }
    }

    #[test]
    fn terms_are_those_that_count_each_once_and_share_a_part_with_the_one_before() {
        for (a_parts, b_parts, end) in [
            (1, 1, 3),
            (2, 2, 3),
            (2, 2, 2),
            (1, 3, 3),
            (3, 1, 3),
            (3, 3, 3),
        ] {
            let terms = Terms::new(a_parts, b_parts, end);
            let all = (0..a_parts).flat_map(|a| (0..b_parts).map(move |b| (a, b)));
            let want: Vec<_> = all.filter(|(a, b)| a + b < end).collect();
            let mut got = terms.pairs().to_vec();
            assert!(
                got.windows(2)
                    .all(|two| two[0].0 == two[1].0 || two[0].1 == two[1].1),
                "{got:?}"
            );
            got.sort();
            assert_eq!(got, want);
        }
    }
}
