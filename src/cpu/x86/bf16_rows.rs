//! Products of few query rows with bf16 rows where they lie in the cache, on AVX-512: a load reads 32 elements.
//! Other types and instruction sets use `kernels::dot` and `kernels::product`.
//!
//! There are two ways to multiply. [`Split`] separates even and odd elements by a shift and a mask, and multiplies
//! in f32. [`Pairs`] multiplies by `vdpbf16ps`, with weights rounded to bf16, which is twice the work per
//! instruction. On Zen 4 this instruction is nearly as fast as an FMA (2.8 and 3.7 per ns). On Emerald Rapids it is
//! not (1.5 and 6.5). So processors with AMX use [`Split`] for a single row, and AMX for more (`amx_rows`).
//!
//! Closures that `std` calls must not hold vectors: where the compiler does not inline such a closure, it is
//! compiled without AVX-512, and every intrinsic in it becomes a call.
#![allow(unsafe_code)]
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "pointer arithmetic under the contract of the kernels' arguments, stated on the fields"
)]
#![allow(
    clippy::incompatible_msrv,
    reason = "compiled under folio_avx512 only, by compilers that have these intrinsics"
)]
#![allow(
    clippy::needless_range_loop,
    reason = "indices run over several arrays of registers at once"
)]

use super::avx512::{Avx512, Avx512With};
use super::bf16_vectors::{Columns, STEP, bf16s, elements, interleaved, lanes};
use crate::cpu::kernels::dot::{Dot, PrepareQueries};
use crate::cpu::kernels::prefetch::Level;
use crate::cpu::kernels::prefetch_rows::RowsWithPrefetch;
use crate::cpu::kernels::product::{Product, RowSource};
use crate::cpu::kernels::simd::Simd;
use crate::cpu::kernels::table::FewRows;
use std::arch::x86_64::*;

/// Products in f32. Needs AVX-512 F, BW, DQ and VL.
pub const SPLIT: FewRows = FewRows {
    queries: split_queries,
    dot: split_dot,
    weighted_sum: split_weighted_sum,
    max_dim: usize::MAX,
    setup: None,
};

/// Products by pairs. Needs AVX-512 BF16 too.
pub const PAIRS: FewRows = pairs::<false>();

/// The same, with prefetch into the first-level cache.
pub const PAIRS_PREFETCH_L1: FewRows = pairs::<true>();

const fn pairs<const PREFETCH_L1: bool>() -> FewRows {
    FewRows {
        queries: pairs_queries,
        dot: pairs_dot::<PREFETCH_L1>,
        weighted_sum: pairs_weighted_sum::<PREFETCH_L1>,
        max_dim: usize::MAX,
        setup: None,
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn split_queries(task: &PrepareQueries) {
    queries::<Split>(task);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn split_dot(task: &Dot) {
    dot::<Split>(task);
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn split_weighted_sum(task: &Product<RowsWithPrefetch>) {
    weighted_sum::<Split>(task);
}

#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pairs_queries(task: &PrepareQueries) {
    queries::<Pairs<false>>(task);
}

#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pairs_dot<const PREFETCH_L1: bool>(task: &Dot) {
    dot::<Pairs<PREFETCH_L1>>(task);
}

#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn pairs_weighted_sum<const PREFETCH_L1: bool>(task: &Product<RowsWithPrefetch>) {
    weighted_sum::<Pairs<PREFETCH_L1>>(task);
}

/// A way to multiply.
trait Way {
    /// As in [`Simd`].
    const LEVEL: Level;
    /// Writes 32 elements of a query, reordered for `multiply`, over the 32 floats `low` and `high`.
    unsafe fn query(at: *mut f32, d: usize, low: __m512, high: __m512);
    /// `sum` plus products of 32 elements of a key with those of a query from `d` on.
    unsafe fn multiply(sum: __m512, key: __m512i, query: *const f32, d: usize) -> __m512;
    /// Reorders 32 columns from their natural order to that of the sums, and back.
    unsafe fn enter(natural: Columns) -> Columns;
    unsafe fn leave(sums: Columns) -> Columns;
    /// Adds all weighted values, from `column` on, to the sums of `R` rows.
    unsafe fn weighted_sum<const R: usize, const N: usize, const TAIL: bool>(
        task: &Product<RowsWithPrefetch>,
        row: usize,
        column: usize,
        share: usize,
        sums: &mut [[Columns; N]; R],
    );
}

struct Split;
struct Pairs<const PREFETCH_L1: bool>;

impl Way for Split {
    const LEVEL: Level = Avx512::LEVEL;

    #[inline(always)]
    unsafe fn query(at: *mut f32, d: usize, low: __m512, high: __m512) {
        let [even, odd] = Split::enter([low, high]);
        _mm512_storeu_ps(at.add(d), even);
        _mm512_storeu_ps(at.add(d + 16), odd);
    }

    #[inline(always)]
    unsafe fn multiply(sum: __m512, key: __m512i, query: *const f32, d: usize) -> __m512 {
        let [even, odd] = even_odd(key);
        let sum = _mm512_fmadd_ps(even, _mm512_loadu_ps(query.add(d)), sum);
        _mm512_fmadd_ps(odd, _mm512_loadu_ps(query.add(d + 16)), sum)
    }

    #[inline(always)]
    unsafe fn enter([low, high]: Columns) -> Columns {
        let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        [
            _mm512_permutex2var_ps(low, even, high),
            _mm512_permutex2var_ps(low, odd, high),
        ]
    }

    #[inline(always)]
    unsafe fn leave(sums: Columns) -> Columns {
        interleaved(sums)
    }

    #[inline(always)]
    unsafe fn weighted_sum<const R: usize, const N: usize, const TAIL: bool>(
        task: &Product<RowsWithPrefetch>,
        row: usize,
        column: usize,
        share: usize,
        sums: &mut [[Columns; N]; R],
    ) {
        for j in 0..task.depth {
            task.b.prefetch_lines(share, Self::LEVEL);
            let values = task.b.at(j);
            let mut x = [[_mm512_setzero_ps(); 2]; N];
            for n in 0..N {
                x[n] = even_odd(elements::<TAIL>(values, column + n * STEP, task.columns));
            }
            for r in 0..R {
                let weight = _mm512_set1_ps(*task.a.add((row + r) * task.lda + j));
                for n in 0..N {
                    for half in 0..2 {
                        sums[r][n][half] = _mm512_fmadd_ps(weight, x[n][half], sums[r][n][half]);
                    }
                }
            }
        }
    }
}

impl<const PREFETCH_L1: bool> Way for Pairs<PREFETCH_L1> {
    const LEVEL: Level = Avx512With::<PREFETCH_L1>::LEVEL;

    #[inline(always)]
    unsafe fn query(at: *mut f32, d: usize, low: __m512, high: __m512) {
        // The queries were bf16, so this is exact.
        let at = at.add(d / 2).cast::<__m256i>();
        for (half, x) in [low, high].into_iter().enumerate() {
            let words = _mm512_srli_epi32::<16>(_mm512_castps_si512(x));
            _mm256_storeu_si256(at.add(half), _mm512_cvtepi32_epi16(words));
        }
    }

    #[inline(always)]
    unsafe fn multiply(sum: __m512, key: __m512i, query: *const f32, d: usize) -> __m512 {
        let query = _mm512_loadu_si512(query.add(d / 2).cast());
        _mm512_dpbf16_ps(sum, bf16s(key), bf16s(query))
    }

    #[inline(always)]
    unsafe fn enter([low, high]: Columns) -> Columns {
        [
            _mm512_shuffle_f32x4::<0x88>(low, high),
            _mm512_shuffle_f32x4::<0xdd>(low, high),
        ]
    }

    #[inline(always)]
    unsafe fn leave(sums: Columns) -> Columns {
        in_order(sums)
    }

    /// Row `j` goes with row `j + 16` of every 32.
    #[inline(always)]
    unsafe fn weighted_sum<const R: usize, const N: usize, const TAIL: bool>(
        task: &Product<RowsWithPrefetch>,
        row: usize,
        column: usize,
        share: usize,
        sums: &mut [[Columns; N]; R],
    ) {
        for first in (0..task.depth).step_by(STEP) {
            let count = STEP.min(task.depth - first);
            let mut weights = [[0u16; STEP]; R];
            for r in 0..R {
                let a = task.a.add((row + r) * task.lda + first);
                let low = _mm512_maskz_loadu_ps(lanes(count), a);
                let high =
                    _mm512_maskz_loadu_ps(lanes(count.saturating_sub(16)), a.wrapping_add(16));
                Avx512::store_bf16_pairs(weights[r].as_mut_ptr(), low, high);
            }
            for j in 0..count.min(16) {
                task.b.prefetch_lines(2 * share, Self::LEVEL);
                let values = task.b.at(first + j);
                let mut x = [[_mm512_setzero_si512(); 2]; N];
                for n in 0..N {
                    let at = column + n * STEP;
                    let a = elements::<TAIL>(values, at, task.columns);
                    // Past the last row the values are zero. The last row again might hold an infinity.
                    let b = match j + 16 < count {
                        true => elements::<TAIL>(task.b.at(first + j + 16), at, task.columns),
                        false => _mm512_setzero_si512(),
                    };
                    x[n] = [_mm512_unpacklo_epi16(a, b), _mm512_unpackhi_epi16(a, b)];
                }
                for r in 0..R {
                    let pair = weights[r].as_ptr().cast::<i32>().add(j).read_unaligned();
                    let pair = bf16s(_mm512_set1_epi32(pair));
                    for n in 0..N {
                        for half in 0..2 {
                            sums[r][n][half] =
                                _mm512_dpbf16_ps(sums[r][n][half], pair, bf16s(x[n][half]));
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn queries<W: Way>(task: &PrepareQueries) {
    for r in 0..task.rows {
        let at = task.q.add(r * task.ldq);
        for d in (0..task.dim).step_by(STEP) {
            let low = _mm512_maskz_loadu_ps(lanes(task.dim - d), at.add(d));
            let high = lanes((task.dim - d).saturating_sub(16));
            let high = _mm512_maskz_loadu_ps(high, at.wrapping_add(d + 16));
            W::query(at, d, low, high);
        }
    }
}

#[inline(always)]
unsafe fn dot<W: Way>(task: &Dot) {
    let quads = task.k.rows.count.div_ceil(16) * 4 * blocks(task.rows);
    let share = (*task.k.prefetch).lines_per_step(quads * task.dim.div_ceil(STEP));
    for key in (0..task.k.rows.count).step_by(16) {
        let mut r = 0;
        while r + 4 <= task.rows {
            dot_block::<W, 4>(task, r, key, share);
            r += 4;
        }
        while r < task.rows {
            dot_block::<W, 1>(task, r, key, share);
            r += 1;
        }
    }
}

/// `R` rows against 16 keys.
#[inline(always)]
unsafe fn dot_block<W: Way, const R: usize>(task: &Dot, r0: usize, key: usize, share: usize) {
    // A loop, and not unrolled: with all quads in registers the sums of a quad would be spilled to the stack.
    let mut quads = [[_mm512_setzero_ps(); R]; 4];
    for (i, quad) in quads.iter_mut().enumerate() {
        *quad = dot_quad::<W, R>(task, r0, key + 4 * i, share);
    }
    for r in 0..R {
        let s = task.s.add((r0 + r) * task.lds + key);
        let [a, b, c, d] = quads;
        _mm512_storeu_ps(s, lane_sums(a[r], b[r], c[r], d[r]));
    }
}

/// `R` rows against four keys: 128-bit lane `l` of each vector holds the sums of lanes `l`.
#[inline(always)]
unsafe fn dot_quad<W: Way, const R: usize>(
    task: &Dot,
    r0: usize,
    key: usize,
    share: usize,
) -> [__m512; R] {
    let q = task.q.add(r0 * task.ldq);
    // Past the end the last row is read again; its scores land in padding.
    let k = task.k.rows;
    let last = k.count - 1;
    let keys = [
        k.at_row(last.min(key)),
        k.at_row(last.min(key + 1)),
        k.at_row(last.min(key + 2)),
        k.at_row(last.min(key + 3)),
    ];
    let mut sums = [[_mm512_setzero_ps(); 4]; R];
    let mut d = 0;
    while d + STEP <= task.dim {
        (*task.k.prefetch).prefetch_lines(share, W::LEVEL);
        dot_step::<W, R, false>(&mut sums, keys, q, d, task);
        d += STEP;
    }
    if d < task.dim {
        dot_step::<W, R, true>(&mut sums, keys, q, d, task);
    }
    let mut quads = [_mm512_setzero_ps(); R];
    for r in 0..R {
        quads[r] = quad_sums(sums[r]);
    }
    quads
}

/// Adds the products of 32 elements; of fewer at the `TAIL` of the row.
#[inline(always)]
unsafe fn dot_step<W: Way, const R: usize, const TAIL: bool>(
    sums: &mut [[__m512; 4]; R],
    keys: [*const u8; 4],
    q: *const f32,
    d: usize,
    task: &Dot,
) {
    let mut k = [_mm512_setzero_si512(); 4];
    for i in 0..4 {
        k[i] = elements::<TAIL>(keys[i], d, task.dim);
    }
    for r in 0..R {
        for i in 0..4 {
            sums[r][i] = W::multiply(sums[r][i], k[i], q.add(r * task.ldq), d);
        }
    }
}

#[inline(always)]
unsafe fn weighted_sum<W: Way>(task: &Product<RowsWithPrefetch>) {
    let passes = task.columns.div_ceil(2 * STEP) * blocks(task.rows);
    let share = task.b.lines_per_step(passes * task.depth);
    let mut column = 0;
    while column + 2 * STEP <= task.columns {
        weigh_columns::<W, 2, false>(task, column, share);
        column += 2 * STEP;
    }
    if column + STEP <= task.columns {
        weigh_columns::<W, 1, false>(task, column, share);
        column += STEP;
    }
    if column < task.columns {
        weigh_columns::<W, 1, true>(task, column, share);
    }
}

/// All rows of `N` times 32 columns; of fewer at the `TAIL` of the row.
#[inline(always)]
unsafe fn weigh_columns<W: Way, const N: usize, const TAIL: bool>(
    task: &Product<RowsWithPrefetch>,
    column: usize,
    share: usize,
) {
    let mut r = 0;
    while r + 4 <= task.rows {
        weigh_block::<W, 4, N, TAIL>(task, r, column, share);
        r += 4;
    }
    while r < task.rows {
        weigh_block::<W, 1, N, TAIL>(task, r, column, share);
        r += 1;
    }
}

#[inline(always)]
unsafe fn weigh_block<W: Way, const R: usize, const N: usize, const TAIL: bool>(
    task: &Product<RowsWithPrefetch>,
    row: usize,
    column: usize,
    share: usize,
) {
    let mut sums = [[[_mm512_setzero_ps(); 2]; N]; R];
    let c = task.c.add(row * task.ldc + column);
    if !task.alpha.is_null() {
        for r in 0..R {
            let alpha = _mm512_set1_ps(*task.alpha.add(row + r));
            for n in 0..N {
                let at = c.add(r * task.ldc + n * STEP);
                let low = _mm512_mul_ps(alpha, _mm512_loadu_ps(at));
                let high = _mm512_mul_ps(alpha, _mm512_loadu_ps(at.add(16)));
                sums[r][n] = W::enter([low, high]);
            }
        }
    }
    W::weighted_sum::<R, N, TAIL>(task, row, column, share, &mut sums);
    for r in 0..R {
        for n in 0..N {
            let at = c.add(r * task.ldc + n * STEP);
            let [low, high] = W::leave(sums[r][n]);
            _mm512_storeu_ps(at, low);
            _mm512_storeu_ps(at.add(16), high);
        }
    }
}

/// Number of blocks, of four rows or one, that `rows` are cut into.
#[inline(always)]
fn blocks(rows: usize) -> usize {
    rows / 4 + rows % 4
}

/// Restores the order of 32 columns after unpacking, which took columns 0 to 3, 8 to 11, … into one vector and the
/// others into the next.
#[inline(always)]
unsafe fn in_order([first, second]: Columns) -> Columns {
    let low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    let high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    [
        _mm512_permutex2var_ps(first, low, second),
        _mm512_permutex2var_ps(first, high, second),
    ]
}

#[inline(always)]
unsafe fn even_odd(x: __m512i) -> Columns {
    let even = _mm512_slli_epi32::<16>(x);
    let odd = _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000u32 as i32));
    [_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)]
}

/// Sums of four vectors by 128-bit lanes: lane `l` holds the sums of their lanes `l`.
#[inline(always)]
unsafe fn quad_sums([a, b, c, d]: [__m512; 4]) -> __m512 {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
    _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)))
}

/// Adds the 128-bit lanes of each vector, and puts the four results side by side.
#[inline(always)]
unsafe fn lane_sums(a: __m512, b: __m512, c: __m512, d: __m512) -> __m512 {
    halves(halves(a, b), halves(c, d))
}

/// Adds neighbouring 128-bit lanes: those of `a`, then those of `b`.
#[inline(always)]
unsafe fn halves(a: __m512, b: __m512) -> __m512 {
    let even = _mm512_shuffle_f32x4::<0x88>(a, b);
    _mm512_add_ps(even, _mm512_shuffle_f32x4::<0xdd>(a, b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Isa, for_each_isa};
    use crate::cpu::kernels::prefetch_rows::RowPrefetch;
    use crate::cpu::kernels::rows::Rows;
    use crate::dtype::DType;
    use half::bf16;

    /// Most keys or values.
    const MOST: usize = 128;

    /// Small integers, so that every sum is exact in any order.
    fn integer(i: usize) -> f32 {
        (i * 7919 % 15) as f32 - 7.0
    }

    #[test]
    fn dot_products_are_exact_in_integers() {
        for_each_isa(|isa| {
            for (rows, count, dim) in [
                (1, 1, 8usize),
                (4, 64, 128),
                (5, 17, 80),
                (7, 3, 40),
                (6, 100, 136),
                (16, 33, 256),
                (3, 18, 576),
            ] {
                let ldq = dim.next_multiple_of(32);
                let mut q: Vec<f32> = (0..rows * ldq).map(integer).collect();
                let want_q = q.clone();
                let k: Vec<bf16> = (0..count * dim)
                    .map(|i| bf16::from_f32(integer(i)))
                    .collect();
                let offsets: Vec<i64> = (0..count as i64).map(|j| j * dim as i64 * 2).collect();
                let mut s = vec![0f32; rows * MOST];
                let queries = PrepareQueries {
                    q: q.as_mut_ptr(),
                    ldq,
                    rows,
                    dim,
                };
                let keys = Rows {
                    base: k.as_ptr().cast(),
                    offsets: offsets.as_ptr(),
                    count,
                };
                let task = Dot {
                    q: q.as_ptr(),
                    ldq,
                    rows,
                    k: RowsWithPrefetch {
                        rows: keys,
                        prefetch: &RowPrefetch::new(keys, 2 * dim),
                    },
                    dim,
                    s: s.as_mut_ptr(),
                    lds: MOST,
                };
                let kernels = isa.kernels().few(DType::BF16, rows, dim);
                let _prepared = kernels.prepare_thread(rows);
                // SAFETY: rows and keys lie in the vectors, and `s` has room for `MOST` scores a row.
                unsafe {
                    (kernels.queries)(&queries);
                    (kernels.dot)(&task);
                }
                for (r, j) in (0..rows).flat_map(|r| (0..count).map(move |j| (r, j))) {
                    let product = |d: usize| want_q[r * ldq + d] * k[j * dim + d].to_f32();
                    let want: f32 = (0..dim).map(product).sum();
                    assert_eq!(
                        s[r * MOST + j],
                        want,
                        "{isa:?} {rows} {count} {dim}: {r} {j}"
                    );
                }
            }
        });
    }

    /// Weights, values, sums and their factors, all small integers.
    struct Weighing {
        rows: usize,
        columns: usize,
        a: Vec<f32>,
        b: Vec<bf16>,
        alpha: Vec<f32>,
        before: Vec<f32>,
    }

    impl Weighing {
        fn new(rows: usize, depth: usize, columns: usize) -> Weighing {
            Weighing {
                rows,
                columns,
                a: (0..rows * MOST).map(integer).collect(),
                b: (0..depth * columns)
                    .map(|i| bf16::from_f32(integer(i)))
                    .collect(),
                alpha: (0..rows).map(integer).collect(),
                before: (0..rows * columns.next_multiple_of(32))
                    .map(integer)
                    .collect(),
            }
        }

        fn depth(&self) -> usize {
            self.b.len() / self.columns
        }

        fn outcome(&self, isa: Isa) -> Vec<f32> {
            let step = self.columns as i64 * 2;
            let offsets: Vec<i64> = (0..self.depth() as i64).map(|j| j * step).collect();
            let mut c = self.before.clone();
            let values = Rows {
                base: self.b.as_ptr().cast(),
                offsets: offsets.as_ptr(),
                count: self.depth(),
            };
            let task = Product {
                a: self.a.as_ptr(),
                lda: MOST,
                rows: self.rows,
                depth: self.depth(),
                b: RowsWithPrefetch {
                    rows: values,
                    prefetch: &RowPrefetch::new(values, 2 * self.columns),
                },
                columns: self.columns,
                c: c.as_mut_ptr(),
                ldc: self.columns.next_multiple_of(32),
                alpha: self.alpha.as_ptr(),
            };
            let kernels = isa.kernels().few(DType::BF16, self.rows, self.columns);
            let _prepared = kernels.prepare_thread(self.rows);
            // SAFETY: weights, values and sums lie in the vectors.
            unsafe { (kernels.weighted_sum)(&task) };
            c
        }

        fn wanted(&self, r: usize, d: usize) -> f32 {
            let product = |j: usize| self.a[r * MOST + j] * self.b[j * self.columns + d].to_f32();
            let sum: f32 = (0..self.depth()).map(product).sum();
            self.alpha[r] * self.before[r * self.columns.next_multiple_of(32) + d] + sum
        }

        /// The sums are exact, or infinite or NaN as they should be.
        fn check(&self, isa: Isa) {
            let c = self.outcome(isa);
            for (r, d) in (0..self.rows).flat_map(|r| (0..self.columns).map(move |d| (r, d))) {
                let got = c[r * self.columns.next_multiple_of(32) + d];
                let want = self.wanted(r, d);
                let (rows, depth, columns) = (self.rows, self.depth(), self.columns);
                assert!(
                    got == want || (got.is_nan() && want.is_nan()),
                    "{isa:?} {rows} {depth} {columns}: {r} {d}: {got} for {want}"
                );
            }
        }
    }

    const WEIGHINGS: [(usize, usize, usize); 9] = [
        (1, 1, 8),
        (4, 64, 128),
        (5, 17, 80),
        (7, 3, 40),
        (6, 100, 136),
        (8, 65, 96),
        (11, 128, 64),
        (16, 49, 256),
        (2, 33, 512),
    ];

    #[test]
    fn weighted_sums_are_exact_in_integers() {
        for_each_isa(|isa| {
            for (rows, depth, columns) in WEIGHINGS {
                Weighing::new(rows, depth, columns).check(isa);
            }
        });
    }

    #[test]
    fn infinite_values_reach_their_columns_only() {
        for_each_isa(|isa| {
            for (rows, depth, columns) in WEIGHINGS {
                let mut weighing = Weighing::new(rows, depth, columns);
                weighing.b[(depth - 1) * columns + 5] = bf16::INFINITY;
                weighing.b[depth / 2 * columns + columns - 2] = bf16::NAN;
                weighing.check(isa);
            }
        });
    }
}
