//! Vectors of 32 bf16 numbers on AVX-512: loads that end with a row, and the orders that columns take on their way
//! through products. `bf16_rows`, `bf16_pairs`, `amx_rows` and the packing of blocks share them.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract stated on the function"
)]
#![allow(
    clippy::incompatible_msrv,
    reason = "compiled under folio_avx512 only, by compilers that have these intrinsics"
)]

use crate::cpu::kernels::rows::Rows;
use std::arch::x86_64::*;

/// Elements of a vector.
pub const STEP: usize = 32;

/// Sums of 32 columns, in the order of the kernel that computes them.
pub type Columns = [__m512; 2];

/// Elements `first..first + 32` of a row; at its `TAIL`, zeros from `end` on.
#[inline(always)]
pub unsafe fn elements<const TAIL: bool>(row: *const u8, first: usize, end: usize) -> __m512i {
    let at = row.add(2 * first);
    if TAIL {
        return _mm512_maskz_loadu_epi16(u32::MAX >> (STEP + first - end), at.cast());
    }
    _mm512_loadu_si512(at.cast())
}

/// 32 elements of a row, or as many as there are before `end`, and zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn elements_up_to(row: *const u8, first: usize, end: usize) -> __m512i {
    match first + STEP <= end {
        true => elements::<false>(row, first, end),
        false => elements::<true>(row, first, end),
    }
}

/// The first `count` lanes of 16.
#[inline(always)]
pub fn lanes(count: usize) -> __mmask16 {
    ((1u32 << count.min(16)) - 1) as __mmask16
}

/// Restores the order of 32 columns, of which one vector holds the even and one the odd columns.
#[inline(always)]
pub unsafe fn interleaved([even, odd]: Columns) -> Columns {
    let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    [
        _mm512_permutex2var_ps(even, low, odd),
        _mm512_permutex2var_ps(even, high, odd),
    ]
}

#[inline(always)]
pub unsafe fn bf16s(x: __m512i) -> __m512bh {
    // SAFETY: two names for 512 bits.
    unsafe { std::mem::transmute(x) }
}

/// Turns up to 32 bf16 rows into 16 rows of pairs, `ld` words apart: word `c` of row `i` holds (row 2i, row 2i + 1)
/// at column `c`. Missing rows, and columns up to a multiple of 32, become zero. Returns whether every element is
/// finite.
///
/// # Safety
/// Needs AVX-512 F, BW and VL, rows of `columns` elements (a multiple of 8), and room at `dst`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn pair_rows(rows: &Rows, columns: usize, dst: *mut u16, ld: usize) -> bool {
    let exponent = _mm512_set1_epi16(0x7f80);
    let left = _mm512_loadu_si512(LEFT.as_ptr().cast());
    let right = _mm512_loadu_si512(RIGHT.as_ptr().cast());
    let mut special = 0;
    for pair in 0..STEP / 2 {
        for c in (0..columns).step_by(STEP) {
            let a = elements_of_row(rows, 2 * pair, c, columns);
            let b = elements_of_row(rows, 2 * pair + 1, c, columns);
            for x in [a, b] {
                let bits = _mm512_and_si512(x, exponent);
                special |= _mm512_cmpeq_epi16_mask(bits, exponent);
            }
            let at = dst.add(2 * (pair * ld + c));
            _mm512_storeu_si512(at.cast(), _mm512_permutex2var_epi16(a, left, b));
            _mm512_storeu_si512(at.add(STEP).cast(), _mm512_permutex2var_epi16(a, right, b));
        }
    }
    special == 0
}

/// Elements of `a`, and from 32 on of `b`, that make up the first and the last 16 pairs.
const LEFT: [u16; STEP] = pairs_from(0);
const RIGHT: [u16; STEP] = pairs_from(16);

const fn pairs_from(first: u16) -> [u16; STEP] {
    let mut order = [0; STEP];
    let mut i = 0;
    while i < STEP {
        order[i] = first + i as u16 / 2 + (i as u16 % 2) * 32;
        i += 1;
    }
    order
}

/// 32 elements of a row; zeros beyond the rows and columns.
///
/// # Safety
/// As for [`pair_rows`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn elements_of_row(rows: &Rows, j: usize, c: usize, columns: usize) -> __m512i {
    if j >= rows.count {
        return _mm512_setzero_si512();
    }
    elements_up_to(rows.at_row(j), c, columns)
}
