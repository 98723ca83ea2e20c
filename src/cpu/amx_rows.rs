//! Products with bf16 rows where they lie in the cache, for up to 16 query rows, on AMX. Both products of a
//! head and 32 keys take as long for 16 rows as for one, and vectors do no more than rearrange. Scores pay
//! off from four rows on, sums from five; `bf16_rows` does the others.
//!
//! Scores are k · qᵀ with keys as they lie: a tile is 32 columns of 16 keys, read in place where the keys
//! are equally far apart. Sums are p · v with values two by two: a tile is 16 columns of 32 values.
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
use super::bf16_rows::{SPLIT, elements_up_to, in_order, lanes};
use super::isa::FewRows;
use super::product::Product;
use super::rows::{Dot, Queries, Rows, Streamed};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Keys or values per step, and elements of a row in a tile.
const STEP: usize = 32;

/// Steps that are summed up in tiles.
const STEPS: usize = 2;

/// Keys per tile of scores; most query rows.
const SIDE: usize = 16;

/// Most columns of a head.
const MOST: usize = 256;

/// Both products on tiles. The kernels need AMX, AVX-512 F, BW, DQ, VL and BF16, and [`RowTiles`] for as many
/// rows as their arguments have.
pub const TILES: FewRows = FewRows {
    queries,
    dot,
    weigh,
    on_tiles: true,
};

/// Scores on tiles, sums on vectors.
pub const SCORES: FewRows = FewRows {
    weigh: SPLIT.weigh,
    ..TILES
};

/// Memory on the stack that begins on a cache line. Nothing is read that was not written first.
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

/// Word `i · rows + r` becomes elements `2i` and `2i + 1` of row `r`. The queries were bf16, so nothing is
/// lost.
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
unsafe fn queries(task: &Queries) {
    assert!(task.rows <= SIDE && task.ldq <= MOST);
    let mut words = Lines::<[u32; SIDE * MOST / 2]>::new();
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
    assert!(task.rows <= SIDE && task.dim <= MOST);
    let keys = task.k.rows;
    let steps = task.dim.div_ceil(STEP);
    let ahead = &*task.k.ahead;
    let share = ahead.share_rows(keys.count.div_ceil(2 * SIDE) * steps);
    let mut copies = Lines::<[u16; 2 * SIDE * MOST]>::new();
    let mut scores = Lines::<[f32; 4 * SIDE * SIDE]>::new();
    let (copies, scores) = (copies.at::<u16>(), scores.at::<f32>());
    // The scores of a step are put into rows after the products of the next, which need not wait for them.
    let place = |first: usize| scores.wrapping_add(first % (4 * SIDE) * SIDE);
    for first in (0..keys.count + 2 * SIDE).step_by(2 * SIDE) {
        if first < keys.count {
            let (a, lda) = key_tile(&keys, first, task.dim, copies);
            let (b, ldb) = key_tile(&keys, first + SIDE, task.dim, copies.add(SIDE * MOST));
            RowTiles::zero_scores();
            for step in 0..steps {
                ahead.ask_rows(share);
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

/// 16 keys from `first` on, as the start and the bytes from one to the next: where they lie, or `copies`
/// of them. Past the end the last one stands in.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn key_tile(keys: &Rows, first: usize, dim: usize, copies: *mut u16) -> (*const u8, usize) {
    let last = keys.count - 1;
    // The last tile of a row must not reach beyond it.
    let in_place = dim.is_multiple_of(STEP);
    if in_place && first > last {
        return (keys.at_row(last), 0);
    }
    if in_place
        && first + SIDE <= keys.count
        && let Some(stride) = stride(keys.offsets.add(first))
    {
        return (keys.at_row(first), stride as usize);
    }
    for j in 0..SIDE {
        let row = keys.at_row(last.min(first + j));
        for d in (0..dim).step_by(STEP) {
            let x = elements_up_to(row, d, dim);
            _mm512_storeu_si512(copies.add(j * MOST + d).cast(), x);
        }
    }
    (copies.cast(), 2 * MOST)
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
unsafe fn weigh(task: &Product<Streamed>) {
    assert!(task.rows <= SIDE && task.columns <= MOST);
    let mut weights = Lines::<[u16; STEPS * SIDE * STEP]>::new();
    let mut pairs = Lines::<[u16; STEPS * STEP * MOST]>::new();
    let mut sums = Lines::<[f32; SIDE * MOST]>::new();
    let (weights, pairs) = (weights.at::<u16>(), pairs.at::<u16>());
    let sums = sums.at::<f32>();
    let ahead = &*task.b.ahead;
    let share = ahead.share_rows(SIDE * task.depth.div_ceil(STEP));
    for first in (0..task.depth).step_by(STEPS * STEP) {
        // All tiles are written before the first is read: a tile is not read from stores under way.
        let steps = (task.depth - first).div_ceil(STEP).min(STEPS);
        for step in 0..steps {
            let first = first + step * STEP;
            let end = task.depth.min(first + STEP);
            store_weights(task, first, end - first, weights.add(step * SIDE * STEP));
            let pairs = pairs.add(step * STEP * MOST);
            for j in 0..SIDE {
                ahead.ask_rows(share);
                pair_values(task, first + 2 * j, end, pairs.add(j * STEP));
            }
        }
        for block in 0..task.columns.div_ceil(STEP) {
            RowTiles::zero_sums();
            for step in 0..steps {
                let p = weights.add(step * SIDE * STEP);
                let v = pairs.add(step * STEP * MOST + block * STEP * STEP);
                RowTiles::add_values(p, v);
            }
            RowTiles::store_sums(sums.add(block * STEP * SIDE));
        }
        let alpha = match first {
            0 => task.alpha,
            _ => ONES.as_ptr(),
        };
        add_sums(task, sums, alpha);
    }
}

/// The weights of `count` values from `first` on, in bf16, and zeros.
#[inline]
#[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn store_weights(task: &Product<Streamed>, first: usize, count: usize, to: *mut u16) {
    for r in 0..task.rows {
        let row = halves(task.a.add(r * task.lda + first), count);
        _mm512_store_si512(to.add(r * STEP).cast(), row);
    }
}

/// Values `j` and `j + 1`, interleaved: 32 columns become a row of each of two tiles, four by four. There
/// are zeros from `end` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pair_values(task: &Product<Streamed>, j: usize, end: usize, to: *mut u16) {
    let row = |j: usize| match j < end {
        // SAFETY: the row is one of those of the task.
        true => unsafe { task.b.rows.at_row(j) },
        false => ZEROS.0.as_ptr().cast(),
    };
    let (a, b) = (row(j), row(j + 1));
    for (block, column) in (0..task.columns).step_by(STEP).enumerate() {
        let a = elements_up_to(a, column, task.columns);
        let b = elements_up_to(b, column, task.columns);
        let to = to.add(block * STEP * STEP);
        _mm512_store_si512(to.cast(), _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to.add(SIDE * STEP).cast(), _mm512_unpackhi_epi16(a, b));
    }
}

/// Factors that change nothing.
static ONES: [f32; SIDE] = [1.0; SIDE];

/// What stands in for rows that do not exist.
static ZEROS: Zeros = Zeros([0; MOST]);

#[repr(align(64))]
struct Zeros([u16; MOST]);

/// `c = alpha · c + sums`, or `c = sums` without factors.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn add_sums(task: &Product<Streamed>, sums: *const f32, alpha: *const f32) {
    for r in 0..task.rows {
        for column in (0..task.columns).step_by(STEP) {
            let at = sums.add(column * SIDE + r * SIDE);
            let [mut low, mut high] =
                in_order([_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(SIDE * SIDE))]);
            let c = task.c.add(r * task.ldc + column);
            if !alpha.is_null() {
                let factor = _mm512_set1_ps(*alpha.add(r));
                low = _mm512_fmadd_ps(factor, _mm512_loadu_ps(c), low);
                high = _mm512_fmadd_ps(factor, _mm512_loadu_ps(c.add(SIDE)), high);
            }
            _mm512_storeu_ps(c, low);
            _mm512_storeu_ps(c.add(SIDE), high);
        }
    }
}
