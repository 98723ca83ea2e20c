//! Products of 32 × 32 blocks on vectors: `vdpbf16ps` multiplies pairs of bf16 numbers. On Zen 4 and 5 it takes as
//! long as an FMA and does twice the work. On processors of Intel it takes twice as long as an FMA or longer; where
//! these have AMX, that is faster.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract stated on the function"
)]
#![allow(
    clippy::incompatible_msrv,
    reason = "compiled under folio_avx512 only, by compilers that have these intrinsics"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use super::bf16_vectors::bf16s;
use crate::cpu::kernels::bf16_block::{ELEMENTS, SIDE};
use std::arch::x86_64::*;

/// Rows of C whose sums stay in registers. Products reach 97 % of the rate of the instruction on a Zen 5.
const ROWS: usize = 8;

/// Columns of a vector of C.
const LANES: usize = 16;

/// `c += Σ a · b` over `count` blocks that follow one another in `a` and in `b`; with `overwrite`, `c = …`.
///
/// # Safety
/// Needs AVX-512 F and BF16. `c` must be a block of f32, and `a` and `b` hold the blocks; all must lie on cache
/// lines.
#[target_feature(enable = "avx512bf16,avx512f")]
pub unsafe fn multiply(c: *mut f32, overwrite: bool, a: *const u16, b: *const u16, count: usize) {
    for first in (0..SIDE).step_by(ROWS) {
        let c = c.add(first * SIDE);
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        if !overwrite {
            for r in 0..ROWS {
                for half in 0..2 {
                    sums[r][half] = _mm512_load_ps(c.add(r * SIDE + half * LANES));
                }
            }
        }
        for block in 0..count {
            let (a, b) = (
                a.add(block * ELEMENTS + first * SIDE),
                b.add(block * ELEMENTS),
            );
            for pair in 0..SIDE / 2 {
                let b = b.add(2 * pair * SIDE);
                let b = [
                    bf16s(_mm512_load_si512(b.cast())),
                    bf16s(_mm512_load_si512(b.add(2 * LANES).cast())),
                ];
                for r in 0..ROWS {
                    let a = a.add(r * SIDE + 2 * pair).cast::<i32>();
                    let a = bf16s(_mm512_set1_epi32(a.read_unaligned()));
                    for half in 0..2 {
                        sums[r][half] = _mm512_dpbf16_ps(sums[r][half], a, b[half]);
                    }
                }
            }
        }
        for r in 0..ROWS {
            for half in 0..2 {
                _mm512_store_ps(c.add(r * SIDE + half * LANES), sums[r][half]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;
    use half::bf16;

    #[repr(align(64))]
    struct Lines<T>(T);

    #[test]
    fn blocks_are_multiplied_and_added() {
        if !Isa::Avx512Bf16.is_available() {
            return;
        }
        const COUNT: usize = 3;
        // Small integers: every sum is exact.
        let number = |i: usize| bf16::from_f32((i * 7919 % 15) as f32 - 7.0).to_bits();
        let a = Lines::<[u16; COUNT * ELEMENTS]>(std::array::from_fn(number));
        let b = Lines::<[u16; COUNT * ELEMENTS]>(std::array::from_fn(|i| number(3 * i + 1)));
        let value = |bits: u16| bf16::from_bits(bits).to_f32();
        let want = |row: usize, column: usize| -> f32 {
            let depths = (0..COUNT * SIDE).map(|k| (k / SIDE * ELEMENTS, k % SIDE));
            let products = depths.map(|(block, k)| {
                let pair = block + (k / 2 * SIDE + column) * 2 + k % 2;
                value(a.0[block + row * SIDE + k]) * value(b.0[pair])
            });
            products.sum()
        };
        let mut c = Lines([f32::NAN; ELEMENTS]);
        for times in 1..3u8 {
            // SAFETY: the processor has the instructions; the arrays hold the blocks.
            unsafe {
                multiply(
                    c.0.as_mut_ptr(),
                    times == 1,
                    a.0.as_ptr(),
                    b.0.as_ptr(),
                    COUNT,
                )
            };
            for (i, &got) in c.0.iter().enumerate() {
                assert_eq!(got, f32::from(times) * want(i / SIDE, i % SIDE), "{i}");
            }
        }
    }
}
