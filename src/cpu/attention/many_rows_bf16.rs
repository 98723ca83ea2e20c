//! The walk for many query rows by blocks of bf16, on AMX or AVX512-BF16: one KV head of an item, tile of keys by
//! tile. Keys, values, queries and weights are bf16, or sums of bf16 numbers (`bf16_split`, on AMX only); scores, softmax
//! and sums stay in f32.
//!
//! Everything is transposed: scores and weights have a row per key, outputs a row per column of the
//! values, and 32 query rows, a strip, lie side by side. A strip meets 32 keys, a group, at a time, so its
//! scores stay in the first-level cache. Matrix instructions of AMX run by themselves: while one group's scores
//! become weights, the next group's are computed.
#![allow(unsafe_code)]

use super::item::Item;
use super::many_rows;
use super::next_tile::Coming;
use super::pack;
use super::run::Run;
use super::scratch::Pad;
use super::shape::{Limbs, MAX_DIM_QK, TILED_KEYS};
use crate::cpu::isa::Matrix;
use crate::cpu::kernels::bf16_block::{ELEMENTS, SIDE};
use crate::cpu::kernels::bf16_split::{self, Terms};
use crate::cpu::kernels::prefetch_rows::{Ahead, Due};
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::simd::{Simd, Task};
use crate::cpu::kernels::softmax::{Logits, is_fresh, is_too_large_to_fuse};
use crate::cpu::kernels::transpose::{BLOCK, Transpose};
use crate::cpu::kernels::transposed_softmax::{
    Follow, Hide, Meanwhile, Round, SLOTS, Shape, Weights,
};
use crate::cpu::x86::amx::Tiles;
use crate::cpu::x86::avx512::Avx512;
use crate::cpu::x86::bf16_pairs;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// A head of an item.
struct Walk<'a> {
    run: &'a Run<'a>,
    item: &'a Item<'a>,
    head: usize,
    engine: Engine,
    queries: Rows,
    /// Those after the first two strips. They are packed a strip ahead in the first tile, and the rows of o asked
    /// for and written strip by strip in the last.
    queries_ahead: Ahead,
    outputs_ahead: Ahead,
}

/// What multiplies blocks.
#[allow(
    clippy::large_enum_variant,
    reason = "a thread has one at a time, on its stack: runs allocate nothing"
)]
enum Engine {
    Tiles(Tiles, Products),
    Pairs,
}

impl Engine {
    fn new(matrix: Matrix, run: &Run<'_>) -> Engine {
        match matrix {
            // SAFETY: only `Isa::Amx` has this matrix, and nothing runs on what is not available.
            Matrix::Amx => Engine::Tiles(unsafe { Tiles::new() }, Products::new(run)),
            Matrix::Pairs => Engine::Pairs,
        }
    }
}

/// Computes a head of an item.
pub fn walk(run: &Run<'_>, item: &Item<'_>, head: usize, matrix: Matrix, pad: &mut Pad<'_>) {
    let queries = run.queries(item, head, pad.q_offsets);
    let walk = Walk {
        engine: Engine::new(matrix, run),
        queries_ahead: run.queries_ahead(queries.skip(2 * SIDE)),
        outputs_ahead: run.outputs_ahead(item, head, pad.o_offsets),
        run,
        item,
        head,
        queries,
    };
    let is_done = walk.attend(pad);
    drop(walk);
    if !is_done {
        many_rows::walk(run, item, head, pad);
    }
}

impl Walk<'_> {
    /// All tiles, unless some value is infinite or NaN, which a weight of 0 must not meet, or something else has no
    /// limbs: the f32 walk knows how, and writes all rows again.
    fn attend(&self, pad: &mut Pad<'_>) -> bool {
        let rows = self.item.rows.next_multiple_of(SIDE);
        pad.max[..rows].fill(f32::NEG_INFINITY);
        pad.sum[..rows].fill(0.0);
        let mut coming = self.tile_from(self.item.keys.start, pad);
        let mut is_packed = self.pack_rest(&mut coming, pad)
            && (coming.keys.is_empty() || pack::queries(self.run, &self.queries, 0, pad));
        while is_packed && !coming.keys.is_empty() {
            std::mem::swap(&mut pad.here, &mut pad.next);
            let keys = coming.keys;
            coming = self.tile_from(keys.end, pad);
            is_packed = self.tile(&keys, &mut coming, pad);
        }
        if self.item.keys.is_empty() {
            let strips = (0..rows).step_by(SIDE);
            strips.for_each(|first| finish(self.run, self.item, self.head, first, pad));
        }
        is_packed
    }

    fn tile_from(&self, start: i64, pad: &mut Pad<'_>) -> Coming {
        let sizes = (TILED_KEYS, SIDE);
        Coming::locate(self.run, self.item, self.head, start, sizes, &mut pad.next)
    }

    /// All strips against a tile; packs the next one meanwhile. Returns whether that could be.
    fn tile(&self, keys: &Range<i64>, coming: &mut Coming, pad: &mut Pad<'_>) -> bool {
        let is_first = keys.start == self.item.keys.start;
        let is_last = keys.end == self.item.keys.end;
        let count = self.item.rows.div_ceil(SIDE);
        let mut present = Strip::new(self, keys, 0);
        let mut turn = Turn::default();
        for index in 0..count {
            let (first, left) = (index * SIDE, count - index);
            let next = (left > 1).then(|| Strip::new(self, keys, first + SIDE));
            let packs_queries = is_first && next.is_some();
            if packs_queries && !pack::queries(self.run, &self.queries, first + SIDE, pad) {
                return false;
            }
            let asked = coming.asked();
            if !self.pack(asked, pad) {
                return false;
            }
            let due = [
                Due::share(&coming.k, left),
                Due::share(&coming.v, left),
                Due::rows(&self.queries_ahead, SIDE).when(is_first),
                Due::rows(&self.outputs_ahead, SIDE).when(is_last),
            ];
            present.attend(next.as_ref(), &mut turn, &due, pad);
            if is_last {
                finish(self.run, self.item, self.head, first, pad);
            }
            present = next.unwrap_or(present);
        }
        self.pack_rest(coming, pad)
    }

    /// Packs keys and values of the next tile. Returns whether that can be.
    fn pack(&self, range: Range<usize>, pad: &mut Pad<'_>) -> bool {
        pack::keys(self.run, self.head, range.clone(), pad)
            && pack::values(self.run, self.head, range, pad)
    }

    /// The same for all that are left.
    fn pack_rest(&self, coming: &mut Coming, pad: &mut Pad<'_>) -> bool {
        while let Some(range) = coming.next() {
            if !self.pack(range, pad) {
                return false;
            }
        }
        true
    }
}

/// Writes the rows of a strip.
fn finish(run: &Run<'_>, item: &Item<'_>, head: usize, first: usize, pad: &mut Pad<'_>) {
    let ld = run.shape.ld_vo;
    let rows = first..item.rows.min(first + SIDE);
    let o = &mut pad.o[first * ld..][..SIDE * ld];
    if is_fresh(strip(pad.max, first)) {
        o.fill(0.0);
    }
    let (max, sum) = (&pad.max[rows.clone()], &pad.sum[rows.clone()]);
    if !run.stores_bf16(item) {
        to_rows(run, o.as_ptr(), ld, pad.staged);
        return run.finish(item, head, rows, pad.staged, max, sum);
    }
    // Two columns in a word: half as much to turn around.
    let mut factors = [0.0; SIDE];
    run.settle_rows(item, head, rows.clone(), max, sum, &mut factors);
    let pairs = &mut pad.staged[..SIDE * ld / 2];
    vectorize(&Round {
        o: o.as_ptr(),
        dims: ld,
        factors: factors.as_ptr(),
        dst: pairs.as_mut_ptr().cast(),
    });
    to_rows(run, pairs.as_ptr(), ld / 2, as_words(pad.staged16));
    run.store_bf16(item, head, rows, pad.staged16);
}

/// Turns `columns` rows of 32 words into 32 rows of `columns` words.
fn to_rows(run: &Run<'_>, from: *const f32, columns: usize, to: &mut [f32]) {
    assert!(to.len() >= SIDE * columns);
    let offsets: [i64; BLOCK] = std::array::from_fn(|i| (4 * i * SIDE) as i64);
    for column in (0..columns).step_by(BLOCK) {
        let transpose = Transpose {
            rows: Rows {
                base: from.wrapping_add(column * SIDE).cast(),
                offsets: offsets.as_ptr(),
                count: BLOCK,
            },
            dst: to[column..].as_mut_ptr(),
            ld: columns,
            columns: SIDE,
        };
        // SAFETY: the caller has `columns` rows, a multiple of 16; `to` was checked.
        unsafe { (run.kernels.transpose)(&transpose) };
    }
}

/// Halves, two by two; the scratch's parts start on cache lines.
fn as_words(halves: &mut [u16]) -> &mut [f32] {
    // SAFETY: as many bytes, aligned, and any bits are a float.
    unsafe { std::slice::from_raw_parts_mut(halves.as_mut_ptr().cast(), halves.len() / 2) }
}

/// 32 query rows of an item, and the tile of keys that they meet.
struct Strip<'a> {
    walk: &'a Walk<'a>,
    keys: &'a Range<i64>,
    /// The item's rows; fewer than 32 at its end.
    rows: Range<usize>,
    /// Groups of keys that some row sees, and keys of the tile that all rows see.
    groups: Range<usize>,
    open: Range<usize>,
    has_holes: bool,
    logits: Logits,
}

/// A group of keys, and the block of `s` that its scores are in.
#[derive(Clone, Copy)]
struct Group {
    index: usize,
    block: usize,
}

/// The block of `s` for the next scores, and whether they are there already.
#[derive(Default)]
struct Turn {
    block: usize,
    is_ready: bool,
}

impl Turn {
    /// Takes the block; the other one is next.
    fn take(&mut self) -> usize {
        let block = self.block;
        self.block = 1 - block;
        block
    }
}

impl<'a> Strip<'a> {
    fn new(walk: &'a Walk<'a>, keys: &'a Range<i64>, first: usize) -> Strip<'a> {
        let (run, item) = (walk.run, walk.item);
        let rows = first..item.rows.min(first + SIDE);
        let tokens = rows.start / run.shape.group..rows.end.div_ceil(run.shape.group);
        let seen = item.seen(&tokens, keys, SIDE).unwrap_or(0..0);
        let (open, has_holes) = item.open(&tokens, keys);
        Strip {
            groups: seen.start / SIDE..seen.end.div_ceil(SIDE),
            logits: run.logits(walk.head),
            walk,
            keys,
            rows,
            open,
            has_holes,
        }
    }

    /// The strip against the tile. The first scores of the strip after it are computed as well.
    fn attend(
        &self,
        next: Option<&Strip<'_>>,
        turn: &mut Turn,
        due: &[Due<'_>; 4],
        pad: &mut Pad<'_>,
    ) {
        let groups = self.groups.clone();
        if groups.is_empty() {
            return;
        }
        if !turn.is_ready
            && let Some(scores) = self.scores(groups.start, turn.block, pad)
        {
            (0..SLOTS).for_each(|slot| scores.advance(slot));
        }
        let next = next.filter(|next| !next.groups.is_empty());
        turn.is_ready = next.is_some();
        let mut first = groups.start;
        let mut fresh = is_fresh(strip(pad.max, self.rows.start));
        let mut fused = self.can_fuse(pad);
        let steps = groups.len() * SLOTS / due.len();
        let paces = due.map(|due| due.lines.div_ceil(steps));
        for index in groups.clone() {
            let block = turn.take();
            let group = Group { index, block };
            let scale = self.shape(group, fused, pad);
            let next = match next {
                _ if index + 1 < groups.end => self.scores(index + 1, turn.block, pad),
                Some(next) => next.scores(next.groups.start, turn.block, pad),
                None => None,
            };
            let between = Between { due, paces, next };
            let grown = self.weigh(group, scale, false, pad, &between);
            if grown {
                // What was weighed by the old references goes into o before they move.
                if index > first {
                    self.accumulate(first..index, fresh, pad);
                    (first, fresh) = (index, false);
                }
                self.follow(group, scale, fresh, pad);
                let is_fused = scale != 1.0;
                fused = self.can_fuse(pad);
                let scale = match is_fused && !fused {
                    true => self.scale(group, pad),
                    false => scale,
                };
                self.weigh(group, scale, true, pad, ());
            }
        }
        self.accumulate(first..groups.end, fresh, pad);
    }

    /// Puts the scores of a group into a block, by products that are still to be done where that can be meanwhile.
    fn scores(&self, group: usize, to: usize, pad: &mut Pad<'_>) -> Option<Scores<'a>> {
        let shape = self.walk.run.shape;
        let (limbs, ld_qk) = (shape.limbs, shape.ld_qk);
        let (k, q) = (SIDE * limbs.kv * ld_qk, SIDE * limbs.q * ld_qk);
        let k = pad.here.k16[group * k..][..k].as_ptr();
        let q = pad.q16[self.rows.start / SIDE * q..][..q].as_ptr();
        let s = block(pad.s, to).as_mut_ptr();
        match &self.walk.engine {
            Engine::Tiles(tiles, products) => Some(Scores {
                tiles,
                k,
                q,
                s,
                products: &products.scores,
            }),
            Engine::Pairs => {
                // SAFETY: `k` and `q` hold the blocks of a head dimension, a block of `s` is one.
                unsafe { bf16_pairs::multiply(s, true, k, q, ld_qk / SIDE) };
                None
            }
        }
    }

    /// Whether scores may be scaled as they become weights.
    fn can_fuse(&self, pad: &mut Pad<'_>) -> bool {
        !strip(pad.max, self.rows.start)
            .iter()
            .any(|&max| is_too_large_to_fuse(max))
    }

    /// Scales the scores of a group in place; returns the factor that is left.
    fn scale(&self, group: Group, pad: &mut Pad<'_>) -> f32 {
        self.bend(group, None, pad);
        1.0
    }

    /// Turns raw scores of a group into logits but for a factor, which is returned, and hides keys that
    /// are out of sight. Without `fused` the factor is 1.
    fn shape(&self, group: Group, fused: bool, pad: &mut Pad<'_>) -> f32 {
        let keys = group.index * SIDE..(group.index + 1) * SIDE;
        let slopes = self.walk.run.slopes(self.walk.head);
        let plain = fused && self.logits.cap == 0.0 && self.logits.scale > 0.0 && slopes.is_none();
        if !plain {
            self.bend(group, slopes, pad);
        }
        if self.has_holes {
            self.hide_holes(group, pad);
        } else if keys.start < self.open.start || keys.end > self.open.end {
            self.hide(group, pad);
        }
        match plain {
            true => self.logits.scale * LOG2_E,
            false => 1.0,
        }
    }

    /// First key of a group.
    fn key(&self, group: Group) -> i64 {
        self.keys.start + (group.index * SIDE) as i64
    }

    /// The query row that a row of the strip belongs to.
    fn token(&self, row: usize) -> i64 {
        self.walk.item.q_start + (row / self.walk.run.shape.group) as i64
    }

    fn bend(&self, group: Group, slopes: Option<&[f32]>, pad: &mut Pad<'_>) {
        let mut ahead = [0.0; SIDE];
        let mut row_slopes = [0.0; SIDE];
        for (i, row) in self.rows.clone().enumerate() {
            let position = self.walk.item.sight.position(self.token(row));
            ahead[i] = (position - self.key(group)) as f32;
            row_slopes[i] = slopes.map_or(0.0, |slopes| slopes[row % self.walk.run.shape.group]);
        }
        vectorize(&Shape {
            s: block(pad.s, group.block).as_mut_ptr(),
            logits: self.logits,
            slopes: slopes.map_or(std::ptr::null(), |_| row_slopes.as_ptr()),
            ahead: ahead.as_ptr(),
        });
    }

    fn hide(&self, group: Group, pad: &mut Pad<'_>) {
        let start = self.key(group);
        let end = self.keys.end - start;
        let (mut low, mut high) = ([0.0; SIDE], [0.0; SIDE]);
        let mut seen = 0..0;
        for (i, row) in self.rows.clone().enumerate() {
            // The rows of a token follow one another.
            if i == 0 || row.is_multiple_of(self.walk.run.shape.group) {
                seen = self.walk.item.sight.row(self.token(row));
            }
            low[i] = (seen.start - start) as f32;
            high[i] = (seen.end - start).min(end) as f32;
        }
        vectorize(&Hide {
            s: block(pad.s, group.block).as_mut_ptr(),
            low: low.as_ptr(),
            high: high.as_ptr(),
        });
    }

    fn hide_holes(&self, group: Group, pad: &mut Pad<'_>) {
        let start = self.key(group);
        let keys = start..self.keys.end.min(start + SIDE as i64);
        let s = block(pad.s, group.block);
        let mut token = -1;
        for (i, row) in self.rows.clone().enumerate() {
            if self.token(row) != token {
                token = self.token(row);
                pad.limits[..SIDE].fill(f32::NEG_INFINITY);
                self.walk.item.sight.limits(token, keys.clone(), pad.limits);
            }
            for (j, &limit) in pad.limits[..SIDE].iter().enumerate() {
                if limit == f32::NEG_INFINITY {
                    s[j * SIDE + i] = limit;
                }
            }
        }
        // The rows that make up the strip: keys past the tile's last hold anything, which must not move references.
        for scores in s.chunks_exact_mut(SIDE) {
            scores[self.rows.len()..].fill(f32::NEG_INFINITY);
        }
    }

    /// Weights of a group of keys; whether some reference has to move first, which it has when they are
    /// `settled`.
    fn weigh<M: Meanwhile>(
        &self,
        group: Group,
        scale: f32,
        settled: bool,
        pad: &mut Pad<'_>,
        meanwhile: M,
    ) -> bool {
        match self.walk.run.shape.limbs.q {
            1 => self.weigh_in::<M, 1>(group, scale, settled, pad, meanwhile),
            2 => self.weigh_in::<M, 2>(group, scale, settled, pad, meanwhile),
            _ => self.weigh_in::<M, 3>(group, scale, settled, pad, meanwhile),
        }
    }

    fn weigh_in<M: Meanwhile, const LIMBS: usize>(
        &self,
        group: Group,
        scale: f32,
        settled: bool,
        pad: &mut Pad<'_>,
        meanwhile: M,
    ) -> bool {
        let p = &mut pad.p16[group.index * LIMBS * ELEMENTS..][..LIMBS * ELEMENTS];
        vectorize(&Weights::<M, LIMBS> {
            s: block(pad.s, group.block).as_ptr(),
            p: p.as_mut_ptr(),
            scale,
            max: strip(pad.max, self.rows.start).as_ptr(),
            sum: strip(pad.sum, self.rows.start).as_mut_ptr(),
            settled,
            meanwhile,
        })
    }

    fn follow(&self, group: Group, scale: f32, fresh: bool, pad: &mut Pad<'_>) {
        let ld = self.walk.run.shape.ld_vo;
        vectorize(&Follow {
            s: block(pad.s, group.block).as_ptr(),
            scale,
            max: strip(pad.max, self.rows.start).as_mut_ptr(),
            sum: strip(pad.sum, self.rows.start).as_mut_ptr(),
            o: pad.o[self.rows.start * ld..][..SIDE * ld].as_mut_ptr(),
            dims: if fresh { 0 } else { ld },
        });
    }

    /// `o += vᵀ · p`, or the first summand of o.
    fn accumulate(&self, groups: Range<usize>, fresh: bool, pad: &mut Pad<'_>) {
        let ld = self.walk.run.shape.ld_vo;
        let limbs = self.walk.run.shape.limbs;
        let o = &mut pad.o[self.rows.start * ld..][..SIDE * ld];
        let (all_v, all_p) = (
            groups.end * limbs.kv * ELEMENTS,
            groups.end * limbs.q * ELEMENTS,
        );
        let p = pad.p16[..all_p].as_ptr();
        for column in (0..ld).step_by(SIDE) {
            let o = block(o, column / SIDE).as_mut_ptr();
            let v = pad.here.v16[pack::value_blocks(limbs.kv, column, 0)..][..all_v].as_ptr();
            // SAFETY: a block of o; the slices hold all blocks of the groups.
            unsafe {
                let v = v.add(groups.start * limbs.kv * ELEMENTS);
                let p = p.add(groups.start * limbs.q * ELEMENTS);
                match &self.walk.engine {
                    Engine::Tiles(tiles, products) => {
                        products.add_outputs(tiles, o, fresh, (v, p), limbs, groups.len());
                    }
                    Engine::Pairs => bf16_pairs::multiply(o, fresh, v, p, groups.len()),
                }
            }
        }
    }
}

/// A product of a block of A and one of B: where they start, unless they are those of the step before.
#[derive(Clone, Copy, Default)]
struct Step {
    a: Option<usize>,
    b: Option<usize>,
}

impl Step {
    /// # Safety
    /// The blocks must lie in `a` and `b`.
    #[inline(always)]
    unsafe fn multiply(self, tiles: &Tiles, a: *const u16, b: *const u16) {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(at) = self.a {
                tiles.load_a(a.add(at));
            }
            if let Some(at) = self.b {
                tiles.load_b(b.add(at));
            }
            tiles.multiply();
        }
    }
}

/// Which blocks of two operands are multiplied, for one sum; at most `N` products.
struct Blocks<const N: usize> {
    steps: [Step; N],
    count: usize,
    /// Those of slot `i` are from cut `i` to the next.
    cuts: [usize; SLOTS + 1],
}

/// Most products of a group's scores.
const SCORE_STEPS: usize = MAX_DIM_QK / SIDE * bf16_split::MOST_TERMS;

impl<const N: usize> Blocks<N> {
    /// All of some terms at each of `depth` blocks, where all limbs of a block lie together.
    fn new(terms: &Terms, (a_limbs, b_limbs): (usize, usize), depth: usize) -> Blocks<N> {
        let mut steps = [Step::default(); N];
        let mut last = (None, None);
        let pairs = (0..depth).flat_map(|d| terms.pairs().iter().map(move |pair| (d, pair)));
        let mut count = 0;
        for (d, (a, b)) in pairs {
            let (a, b) = (
                Some((d * a_limbs + a) * ELEMENTS),
                Some((d * b_limbs + b) * ELEMENTS),
            );
            steps[count] = Step {
                a: a.filter(|_| a != last.0),
                b: b.filter(|_| b != last.1),
            };
            last = (a, b);
            count += 1;
        }
        // Products are issued early: they take a while.
        let cut = |slot: usize| (slot * count).div_ceil(STORE_SLOT).min(count);
        Blocks {
            steps,
            count,
            cuts: std::array::from_fn(cut),
        }
    }

    fn all(&self) -> &[Step] {
        &self.steps[..self.count]
    }
}

/// The products of an item.
struct Products {
    /// Of a group's keys and a strip's queries.
    scores: Blocks<SCORE_STEPS>,
    /// Of 32 columns of a group's values, and its weights.
    outputs: Blocks<{ bf16_split::MOST_TERMS }>,
}

impl Products {
    fn new(run: &Run<'_>) -> Products {
        let Limbs { q, kv } = run.shape.limbs;
        let scores = Terms::new(kv, q, bf16_split::MOST);
        let outputs = Terms::new(kv, q, q);
        Products {
            scores: Blocks::new(&scores, (kv, q), run.shape.ld_qk / SIDE),
            outputs: Blocks::new(&outputs, (kv, q), 1),
        }
    }

    /// `o += vᵀ · p` over so many groups, or `o = …`.
    ///
    /// # Safety
    /// `o` must be a block, and `v` and `p` hold those of the groups.
    unsafe fn add_outputs(
        &self,
        tiles: &Tiles,
        o: *mut f32,
        fresh: bool,
        (v, p): (*const u16, *const u16),
        limbs: Limbs,
        groups: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if fresh {
                tiles.zero();
            } else {
                tiles.load(o);
            }
            for group in 0..groups {
                let v = v.add(group * limbs.kv * ELEMENTS);
                let p = p.add(group * limbs.q * ELEMENTS);
                for step in self.outputs.all() {
                    step.multiply(tiles, v, p);
                }
            }
            tiles.store(o);
        }
    }
}

/// The products that make one group's scores, in steps.
#[derive(Clone, Copy)]
struct Scores<'a> {
    tiles: &'a Tiles,
    k: *const u16,
    q: *const u16,
    s: *mut f32,
    products: &'a Blocks<SCORE_STEPS>,
}

impl Scores<'_> {
    /// What belongs into a slot. Scores are stored when their products had time.
    #[inline(always)]
    fn advance(&self, slot: usize) {
        let Blocks { steps, cuts, .. } = self.products;
        let due = &steps[cuts[slot]..cuts[slot + 1]];
        // SAFETY: `k` and `q` hold the blocks, `s` holds one.
        unsafe {
            if slot == 0 {
                self.tiles.zero();
            }
            for step in due {
                step.multiply(self.tiles, self.k, self.q);
            }
            if slot == STORE_SLOT {
                self.tiles.store(self.s);
            }
        }
    }
}

/// What is done while a group's scores become weights: some lines of one kind are asked for in every slot, and the
/// next group's scores computed.
struct Between<'a> {
    due: &'a [Due<'a>; 4],
    paces: [usize; 4],
    next: Option<Scores<'a>>,
}

impl Meanwhile for &Between<'_> {
    #[inline(always)]
    fn advance(self, slot: usize) {
        let kind = slot % self.due.len();
        // SAFETY: the offsets lie in the scratch, and stay as they are during the walk or the tile.
        unsafe { self.due[kind].ahead.ask(self.paces[kind], Avx512::LEVEL) };
        if let Some(next) = self.next {
            next.advance(slot);
        }
    }
}

/// The slot in which scores are stored.
const STORE_SLOT: usize = SLOTS - 3;

/// Part `index` of a slice in blocks.
fn block<T>(all: &mut [T], index: usize) -> &mut [T] {
    &mut all[index * ELEMENTS..][..ELEMENTS]
}

/// A strip's part of an array with an element per row.
fn strip(all: &mut [f32], first: usize) -> &mut [f32] {
    &mut all[first..][..SIDE]
}

/// Runs a task whose pointers are slices of the scratch, as large as its fields say.
fn vectorize<T: Task>(task: &T) -> T::Output {
    // SAFETY: both matrices come with AVX-512; the caller's slices.
    unsafe { Avx512::vectorize(task) }
}
