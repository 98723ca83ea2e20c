//! Products of up to 16 query rows with bf16 rows where they lie in the cache, on AMX. `bf16_rows` computes the same
//! on vectors.
//!
//! A tile of the cache is 32 columns of 16 rows. It is read in place where the rows are equally far apart. Scores
//! are k · qᵀ, with keys as they lie. A product with values would need neighbouring keys in pairs, but neighbours in
//! memory are columns of one key. So each query row becomes two rows of weights: one with zeros for the odd columns,
//! one with zeros for the even columns, and each has a row of sums. Half of the products are with zeros.
//! Interleaving the values on vectors instead took four times as long.
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
    reason = "vectors stay out of iterators, as in `bf16_rows`"
)]

use super::amx::RowTiles;
use super::bf16_rows::SPLIT;
use super::bf16_vectors::{STEP, elements_up_to, interleaved, lanes};
use crate::cpu::kernels::dot::{Dot, PrepareQueries};
use crate::cpu::kernels::prefetch_rows::RowsWithPrefetch;
use crate::cpu::kernels::product::Product;
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::table::{FewRows, ThreadSetup};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Keys or values per tile; most query rows.
const SIDE: usize = 16;

/// Values that are summed up in tiles.
const CHUNK: usize = 4 * SIDE;

/// Widest rows of keys and values. The copies on the stack are sized for them; wider heads go through vectors
/// (`bf16_rows`).
pub const MAX_DIM: usize = 256;

/// Sums of a group of rows: 16 rows of 16 for every 32 columns.
const SUMS: usize = MAX_DIM / STEP * SIDE * SIDE;

/// The kernels. They need AMX, AVX-512 F, BW, DQ, VL and BF16, and tiles configured for as many query rows as their
/// arguments have.
pub const TILES: FewRows = FewRows {
    queries,
    dot,
    weighted_sum,
    max_dim: MAX_DIM,
    setup: Some(ThreadSetup {
        configure: RowTiles::configure,
        release: RowTiles::release,
    }),
};

/// Uninitialised memory on the stack, aligned to a cache line. Everything is written before it is read.
#[repr(align(64))]
struct Lines<T>(MaybeUninit<T>);

impl<T> Lines<T> {
    #[inline(always)]
    fn new() -> Lines<T> {
        Lines(MaybeUninit::uninit())
    }

    #[inline(always)]
    fn at<E>(&mut self) -> *mut E {
        self.0.as_mut_ptr().cast()
    }
}

/// Word `i · rows + r` becomes elements `2i` and `2i + 1` of row `r`. The queries were bf16, so this is exact.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn queries(task: &PrepareQueries) {
    assert!(task.rows <= SIDE && task.ldq <= MAX_DIM);
    let mut words = Lines::<[u32; SIDE * MAX_DIM / 2]>::new();
    let words = words.at::<i32>();
    let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let places = _mm512_mullo_epi32(iota, _mm512_set1_epi32(task.rows as i32));
    for r in 0..task.rows {
        let row = task.q.add(r * task.ldq);
        for d in (0..task.ldq).step_by(STEP) {
            let pairs = halves(row.wrapping_add(d), task.dim.saturating_sub(d));
            let at = words.add(d / 2 * task.rows + r);
            _mm512_i32scatter_epi32::<4>(at, places, pairs);
        }
    }
    let count = task.rows * task.ldq / 2;
    std::ptr::copy_nonoverlapping(words, task.q.cast(), count);
}

/// `count` floats, at most 32, as bf16, and zeros.
#[inline]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn halves(from: *const f32, count: usize) -> __m512i {
    let low = _mm512_maskz_loadu_ps(lanes(count), from);
    let high = lanes(count.saturating_sub(SIDE));
    let high = _mm512_maskz_loadu_ps(high, from.wrapping_add(SIDE));
    // SAFETY: two names for 512 bits.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(high, low)) }
}

#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn dot(task: &Dot) {
    assert!(task.rows <= SIDE && task.dim <= MAX_DIM);
    let keys = task.k.rows;
    let steps = task.dim.div_ceil(STEP);
    let prefetch = &*task.k.prefetch;
    let share = prefetch.rows_per_step(keys.count.div_ceil(2 * SIDE) * steps);
    let mut copies = Lines::<[u16; 2 * SIDE * MAX_DIM]>::new();
    let mut scores = Lines::<[f32; 4 * SIDE * SIDE]>::new();
    let (copies, scores) = (copies.at::<u16>(), scores.at::<f32>());
    // The scores of a step are transposed after the products of the next step are issued, so that these need not
    // wait.
    let place = |first: usize| scores.wrapping_add(first % (4 * SIDE) * SIDE);
    for first in (0..keys.count + 2 * SIDE).step_by(2 * SIDE) {
        if first < keys.count {
            let (a, lda) = cache_tile(&keys, first, task.dim, copies);
            let (b, ldb) = cache_tile(&keys, first + SIDE, task.dim, copies.add(SIDE * MAX_DIM));
            RowTiles::zero_scores();
            for step in 0..steps {
                prefetch.prefetch_rows(share);
                let q = task.q.cast::<u32>().add(step * SIDE * task.rows);
                let d = 2 * STEP * step;
                RowTiles::add_scores(q, 4 * task.rows, a.add(d), lda, b.add(d), ldb);
            }
            RowTiles::store_scores(place(first));
        }
        if first > 0 {
            let first = first - 2 * SIDE;
            for key in (first..keys.count.min(first + 2 * SIDE)).step_by(SIDE) {
                transpose(place(key), task.rows, task.s.add(key), task.lds);
            }
        }
    }
}

/// 16 rows from `first` on: the address of the first and the bytes from one to the next. They are read where they
/// lie, or copied to `copies`. Past the end the last row is read again.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn cache_tile(
    rows: &Rows,
    first: usize,
    dim: usize,
    copies: *mut u16,
) -> (*const u8, usize) {
    let last = rows.count - 1;
    // The last tile of a row must not reach beyond it.
    let in_place = dim.is_multiple_of(STEP);
    if in_place && first > last {
        return (rows.at_row(last), 0);
    }
    if in_place
        && first + SIDE <= rows.count
        && let Some(stride) = stride(rows.offsets.add(first))
    {
        return (rows.at_row(first), stride as usize);
    }
    for j in 0..SIDE {
        let row = rows.at_row(last.min(first + j));
        for d in (0..dim).step_by(STEP) {
            let x = elements_up_to(row, d, dim);
            _mm512_storeu_si512(copies.add(j * MAX_DIM + d).cast(), x);
        }
    }
    (copies.cast(), 2 * MAX_DIM)
}

/// The distance between 16 offsets, if it is always the same.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn stride(offsets: *const i64) -> Option<i64> {
    let stride = (*offsets.add(1)).wrapping_sub(*offsets);
    let steps = _mm512_mullo_epi64(
        _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7),
        _mm512_set1_epi64(stride),
    );
    let want = _mm512_add_epi64(_mm512_set1_epi64(*offsets), steps);
    let low = _mm512_cmpneq_epi64_mask(want, _mm512_loadu_si512(offsets.cast()));
    let want = _mm512_add_epi64(want, _mm512_set1_epi64(stride.wrapping_mul(8)));
    let high = _mm512_cmpneq_epi64_mask(want, _mm512_loadu_si512(offsets.add(8).cast()));
    (low | high == 0).then_some(stride)
}

/// 16 rows of `columns` floats, 16 apart, to rows of 16.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn transpose(from: *const f32, columns: usize, to: *mut f32, ld: usize) {
    for column in (0..columns).step_by(4) {
        // Lane l of vector i: key 4l + i.
        let a = every_fourth(from.add(column));
        let b = every_fourth(from.add(column + SIDE));
        let c = every_fourth(from.add(column + 2 * SIDE));
        let d = every_fourth(from.add(column + 3 * SIDE));
        let low_ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        let low_cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
        let high_ab = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        let high_cd = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
        let rows = [
            _mm512_unpacklo_pd(low_ab, low_cd),
            _mm512_unpackhi_pd(low_ab, low_cd),
            _mm512_unpacklo_pd(high_ab, high_cd),
            _mm512_unpackhi_pd(high_ab, high_cd),
        ];
        for r in 0..rows.len().min(columns - column) {
            _mm512_storeu_ps(to.add((column + r) * ld), _mm512_castpd_ps(rows[r]));
        }
    }
}

/// Four floats of rows 0, 4, 8 and 12.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn every_fourth(from: *const f32) -> __m512 {
    let x = _mm512_castps128_ps512(_mm_loadu_ps(from));
    let x = _mm512_insertf32x4::<1>(x, _mm_loadu_ps(from.add(4 * SIDE)));
    let x = _mm512_insertf32x4::<2>(x, _mm_loadu_ps(from.add(8 * SIDE)));
    _mm512_insertf32x4::<3>(x, _mm_loadu_ps(from.add(12 * SIDE)))
}

#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn weighted_sum(task: &Product<RowsWithPrefetch>) {
    assert!(task.rows <= SIDE && task.columns <= MAX_DIM);
    let groups = task.rows.div_ceil(RowTiles::WEIGHTED);
    let visits = task.depth.div_ceil(SIDE) * task.columns.div_ceil(2 * STEP) * groups;
    let share = (*task.b.prefetch).rows_per_step(visits);
    for first in (0..task.depth).step_by(CHUNK) {
        let chunk = Product {
            a: task.a.add(first),
            depth: CHUNK.min(task.depth - first),
            b: RowsWithPrefetch {
                rows: task.b.rows.skip(first),
                ..task.b
            },
            alpha: match first {
                0 => task.alpha,
                _ => ONES.as_ptr(),
            },
            ..*task
        };
        weigh_chunk(&chunk, share);
    }
}

/// At most [`CHUNK`] values.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn weigh_chunk(task: &Product<RowsWithPrefetch>, share: usize) {
    let mut copies = Lines::<[u16; CHUNK * MAX_DIM]>::new();
    let mut weights = Lines::<[u32; CHUNK * SIDE]>::new();
    let mut sums = Lines::<[f32; SUMS]>::new();
    let (copies, weights, sums) = (copies.at::<u16>(), weights.at::<u32>(), sums.at::<f32>());
    let tiles = task.depth.div_ceil(SIDE);
    let mut values = [(std::ptr::null(), 0); CHUNK / SIDE];
    for (tile, value) in values[..tiles].iter_mut().enumerate() {
        let copies = copies.add(tile * SIDE * MAX_DIM);
        *value = cache_tile(&task.b.rows, tile * SIDE, task.columns, copies);
    }
    for row in (0..task.rows).step_by(RowTiles::WEIGHTED) {
        for tile in 0..tiles {
            spread_weights(task, row, tile * SIDE, weights.add(tile * SIDE * SIDE));
        }
        sum_values(task, &values[..tiles], weights, share, sums);
        let part = Product {
            a: task.a.add(row * task.lda),
            rows: RowTiles::WEIGHTED.min(task.rows - row),
            c: task.c.add(row * task.ldc),
            alpha: match task.alpha.is_null() {
                true => task.alpha,
                false => task.alpha.add(row),
            },
            ..*task
        };
        if are_finite(&part, sums) {
            add_sums(&part, sums);
        } else {
            // Infinities and NaN, multiplied by the zeros, would reach the neighbouring columns.
            (SPLIT.weighted_sum)(&part);
        }
    }
}

/// All columns of tiles of 16 values times their weights. Prefetches `share` rows at each product.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn sum_values(
    task: &Product<RowsWithPrefetch>,
    values: &[(*const u8, usize)],
    weights: *const u32,
    share: usize,
    sums: *mut f32,
) {
    let blocks = task.columns.div_ceil(STEP);
    for block in (0..blocks).step_by(2) {
        // If the last block has no partner, its sums are computed twice.
        let other = (block + 1).min(blocks - 1);
        RowTiles::zero_sums();
        for (tile, (at, ld)) in values.iter().enumerate() {
            (*task.b.prefetch).prefetch_rows(share);
            let weights = weights.add(tile * SIDE * SIDE);
            RowTiles::add_values(weights, at.add(64 * block), at.add(64 * other), *ld);
        }
        RowTiles::store_sums(sums.add(block * SIDE * SIDE));
    }
}

/// The weights of 16 values from `first` on, for as many rows from `row` on as there are sums. For each row, 16
/// words hold them as bf16 in their lower half, and 16 more words in their upper half. Rows and values past the end
/// have weight zero.
#[inline]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn spread_weights(task: &Product<RowsWithPrefetch>, row: usize, first: usize, to: *mut u32) {
    for r in 0..RowTiles::WEIGHTED.min(task.rows) {
        let count = match row + r < task.rows {
            true => task.depth - first,
            false => 0,
        };
        let from = task.a.wrapping_add((row + r) * task.lda + first);
        let p = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(lanes(count), from));
        // SAFETY: two names for 256 bits.
        let even = _mm512_cvtepu16_epi32(unsafe { std::mem::transmute::<__m256bh, __m256i>(p) });
        let to = to.add(2 * r * SIDE);
        _mm512_store_si512(to.cast(), even);
        _mm512_store_si512(to.add(SIDE).cast(), _mm512_slli_epi32::<16>(even));
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn are_finite(task: &Product<RowsWithPrefetch>, sums: *const f32) -> bool {
    // 0 · x is 0 for finite x, and NaN otherwise.
    let mut found = [_mm512_setzero_ps(); 2];
    for block in 0..task.columns.div_ceil(STEP) {
        for r in 0..task.rows {
            let at = sums.add(block * SIDE * SIDE + 2 * r * SIDE);
            for half in 0..2 {
                let x = _mm512_load_ps(at.add(half * SIDE));
                found[half] = _mm512_fmadd_ps(x, _mm512_setzero_ps(), found[half]);
            }
        }
    }
    _mm512_cmpunord_ps_mask(found[0], found[1]) == 0
}

/// Factors of 1.
static ONES: [f32; SIDE] = [1.0; SIDE];

/// `c = alpha · c + sums`, or `c = sums` without factors.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn add_sums(task: &Product<RowsWithPrefetch>, sums: *const f32) {
    for r in 0..task.rows {
        for block in 0..task.columns.div_ceil(STEP) {
            let at = sums.add(block * SIDE * SIDE + 2 * r * SIDE);
            let [mut low, mut high] =
                interleaved([_mm512_load_ps(at), _mm512_load_ps(at.add(SIDE))]);
            let c = task.c.add(r * task.ldc + block * STEP);
            if !task.alpha.is_null() {
                let factor = _mm512_set1_ps(*task.alpha.add(r));
                low = _mm512_fmadd_ps(factor, _mm512_loadu_ps(c), low);
                high = _mm512_fmadd_ps(factor, _mm512_loadu_ps(c.add(SIDE)), high);
            }
            _mm512_storeu_ps(c, low);
            _mm512_storeu_ps(c.add(SIDE), high);
        }
    }
}
