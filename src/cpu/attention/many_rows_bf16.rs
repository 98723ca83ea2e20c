//! The walk for many query rows (prefill) by blocks of bf16, on AMX or AVX512-BF16. It computes one KV head of an
//! item, tile of keys by tile. Queries, keys, values and weights are bf16, or on AMX sums of bf16 parts
//! (`kernels::bf16_split`). Scores, softmax and sums are f32. `many_rows` is the same walk in f32 on any instruction
//! set.
//!
//! Everything is transposed. Scores and weights have a row per key, outputs have a row per column of the values, and
//! 32 query rows, a strip, lie side by side. A strip meets 32 keys, a group, at a time, so the scores of a group
//! stay in the first-level cache. AMX instructions run beside vector instructions: while the scores of one group
//! become weights, AMX computes the scores of the next.
#![allow(unsafe_code)]

use super::amx_products::{PendingScores, Products};
use super::bias::Bias;
use super::item::Item;
use super::many_rows;
use super::next_tile::NextTile;
use super::pack;
use super::run::Run;
use super::scratch::{Scratch, ThreadMemory};
use crate::cpu::isa::Matrix;
use crate::cpu::kernels::bf16_block::{ELEMENTS, SIDE};
use crate::cpu::kernels::prefetch_rows::{PrefetchShare, RowPrefetch};
use crate::cpu::kernels::rows::Rows;
use crate::cpu::kernels::simd::{Simd, Task};
use crate::cpu::kernels::softmax::{Logits, is_too_large_to_fuse, saw_no_key};
use crate::cpu::kernels::transpose::{BLOCK, Transpose};
use crate::cpu::kernels::transposed_softmax::{
    ComputeWeights, Interleaved, MaskRange, Rescale, RoundPairs, SLOTS, ToLogits,
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
    /// The query rows after the first two strips; the first tile packs each strip one strip before it is used. The
    /// rows of o, which the last tile writes strip by strip.
    prefetch_queries: RowPrefetch,
    prefetch_outputs: RowPrefetch,
}

/// The unit that multiplies blocks.
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
            Matrix::Amx => Engine::Tiles(
                unsafe { Tiles::new() },
                Products::new(run.shape.bf16_parts, run.shape.ld_qk),
            ),
            Matrix::Pairs => Engine::Pairs,
        }
    }
}

/// Computes a head of an item.
pub fn walk(
    run: &Run<'_>,
    item: &Item<'_>,
    head: usize,
    matrix: Matrix,
    memory: &mut ThreadMemory<'_>,
) {
    let scratch = &mut memory.blocks();
    let queries = run.queries(item, head, scratch);
    let walk = Walk {
        engine: Engine::new(matrix, run),
        prefetch_queries: run.prefetch_queries(queries.skip(2 * SIDE)),
        prefetch_outputs: run.prefetch_outputs(item, head, scratch.o_offsets),
        run,
        item,
        head,
        queries,
    };
    let is_done = walk.attend(scratch);
    drop(walk);
    if !is_done {
        many_rows::walk(run, item, head, &mut memory.many());
    }
}

impl Walk<'_> {
    /// All tiles. Returns false at the first infinity or NaN, or number without bf16 parts: a weight of 0 must not
    /// be multiplied with it. The f32 walk can do that, and then writes all rows again.
    fn attend(&self, scratch: &mut Scratch<'_>) -> bool {
        let rows = self.item.rows.next_multiple_of(SIDE);
        scratch.max[..rows].fill(f32::NEG_INFINITY);
        scratch.sum[..rows].fill(0.0);
        let mut next_tile = self.tile_from(self.item.keys.start, scratch);
        let mut is_packed = self.pack_rest(&mut next_tile, scratch)
            && (next_tile.keys.is_empty() || pack::queries(self.run, &self.queries, 0, scratch));
        while is_packed && !next_tile.keys.is_empty() {
            std::mem::swap(&mut scratch.tile, &mut scratch.next_tile);
            let keys = next_tile.keys;
            next_tile = self.tile_from(keys.end, scratch);
            is_packed = self.tile(&keys, &mut next_tile, scratch);
        }
        if self.item.keys.is_empty() {
            let strips = (0..rows).step_by(SIDE);
            strips.for_each(|first| finish(self.run, self.item, self.head, first, scratch));
        }
        is_packed
    }

    fn tile_from(&self, start: i64, scratch: &mut Scratch<'_>) -> NextTile {
        let sizes = (self.run.shape.bf16_key_tile, SIDE);
        NextTile::locate(
            self.run,
            self.item,
            self.head,
            start,
            sizes,
            &mut scratch.next_tile,
        )
    }

    /// All strips against a tile; packs the next tile meanwhile. Returns whether all of it could be packed.
    fn tile(&self, keys: &Range<i64>, next_tile: &mut NextTile, scratch: &mut Scratch<'_>) -> bool {
        let is_first = keys.start == self.item.keys.start;
        let is_last = keys.end == self.item.keys.end;
        let count = self.item.rows.div_ceil(SIDE);
        let mut present = Strip::new(self, keys, 0);
        let mut buffers = ScoreBuffers::default();
        for index in 0..count {
            let (first, left) = (index * SIDE, count - index);
            let next = (left > 1).then(|| Strip::new(self, keys, first + SIDE));
            let packs_queries = is_first && next.is_some();
            if packs_queries && !pack::queries(self.run, &self.queries, first + SIDE, scratch) {
                return false;
            }
            let prefetched = next_tile.take_prefetched();
            if !self.pack(prefetched, scratch) {
                return false;
            }
            let prefetches = [
                PrefetchShare::share(&next_tile.k, left),
                PrefetchShare::share(&next_tile.v, left),
                PrefetchShare::rows(&self.prefetch_queries, SIDE).when(is_first),
                PrefetchShare::rows(&self.prefetch_outputs, SIDE).when(is_last),
            ];
            present.attend(next.as_ref(), &mut buffers, &prefetches, scratch);
            if is_last {
                finish(self.run, self.item, self.head, first, scratch);
            }
            present = next.unwrap_or(present);
        }
        self.pack_rest(next_tile, scratch)
    }

    /// Packs some keys and values of the next tile. Returns whether all of them could be packed.
    fn pack(&self, range: Range<usize>, scratch: &mut Scratch<'_>) -> bool {
        pack::keys(self.run, self.head, range.clone(), scratch)
            && pack::values(self.run, self.head, range, scratch)
    }

    /// Packs the keys and values that are left.
    fn pack_rest(&self, next_tile: &mut NextTile, scratch: &mut Scratch<'_>) -> bool {
        while let Some(range) = next_tile.take_next() {
            if !self.pack(range, scratch) {
                return false;
            }
        }
        true
    }
}

/// Writes the rows of a strip.
fn finish(run: &Run<'_>, item: &Item<'_>, head: usize, first: usize, scratch: &mut Scratch<'_>) {
    let ld = run.shape.ld_vo;
    let rows = first..item.rows.min(first + SIDE);
    let o = &mut scratch.o[first * ld..][..SIDE * ld];
    if saw_no_key(strip(scratch.max, first)) {
        o.fill(0.0);
    }
    let (max, sum) = (&scratch.max[rows.clone()], &scratch.sum[rows.clone()]);
    if !run.stores_bf16(item) {
        to_rows(run, o.as_ptr(), ld, scratch.staged);
        return run.store_rows(item, head, rows, scratch.staged, max, sum);
    }
    // Two columns share a word, which halves the transposition.
    let mut factors = [0.0; SIDE];
    run.row_factors(item, head, rows.clone(), max, sum, &mut factors);
    let pairs = &mut scratch.staged[..SIDE * ld / 2];
    vectorize(&RoundPairs {
        o: o.as_ptr(),
        dims: ld,
        factors: factors.as_ptr(),
        dst: pairs.as_mut_ptr().cast(),
    });
    to_rows(run, pairs.as_ptr(), ld / 2, as_words(scratch.staged16));
    run.store_bf16(item, head, rows, scratch.staged16);
}

/// Transposes `columns` rows of 32 words.
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

/// Pairs of 16-bit elements as 32-bit words. The parts of the scratch start on cache lines, so words are aligned.
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
    /// Groups of keys in which some row sees a key, and the keys of the tile that all rows see.
    groups: Range<usize>,
    open: Range<usize>,
    has_holes: bool,
    logits: Logits,
}

/// A group of keys, and the block of `s` that holds its scores.
#[derive(Clone, Copy)]
struct Group {
    index: usize,
    block: usize,
}

/// The two blocks of `s`: which one takes the next scores, and whether it holds them already.
#[derive(Default)]
struct ScoreBuffers {
    block: usize,
    is_ready: bool,
}

impl ScoreBuffers {
    /// Takes the block; the other one is for the scores after these.
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
        let visible = item.visible_to_any(&tokens, keys, SIDE).unwrap_or(0..0);
        let (open, has_holes) = item.visible_to_all(&tokens, keys);
        Strip {
            groups: visible.start / SIDE..visible.end.div_ceil(SIDE),
            logits: run.logits(item, walk.head),
            walk,
            keys,
            rows,
            open,
            has_holes,
        }
    }

    /// The strip against the tile. Also computes the first scores of the next strip.
    fn attend(
        &self,
        next: Option<&Strip<'_>>,
        buffers: &mut ScoreBuffers,
        prefetches: &[PrefetchShare<'_>; 4],
        scratch: &mut Scratch<'_>,
    ) {
        let groups = self.groups.clone();
        if groups.is_empty() {
            return;
        }
        if !buffers.is_ready
            && let Some(scores) = self.scores(groups.start, buffers.block, scratch)
        {
            (0..SLOTS).for_each(|slot| scores.advance(slot));
        }
        let next = next.filter(|next| !next.groups.is_empty());
        buffers.is_ready = next.is_some();
        let mut first = groups.start;
        let mut overwrite = saw_no_key(strip(scratch.max, self.rows.start));
        let mut fused = self.can_fuse(scratch);
        let steps = groups.len() * SLOTS / prefetches.len();
        let paces = prefetches.map(|prefetches| prefetches.lines.div_ceil(steps));
        for index in groups.clone() {
            let block = buffers.take();
            let group = Group { index, block };
            let scale = self.to_logits(group, fused, scratch);
            let next = match next {
                _ if index + 1 < groups.end => self.scores(index + 1, buffers.block, scratch),
                Some(next) => next.scores(next.groups.start, buffers.block, scratch),
                None => None,
            };
            let interleaved = InterleavedWork {
                prefetches,
                paces,
                next,
            };
            let grown = self.compute_weights(group, scale, false, scratch, &interleaved);
            if grown {
                // The weights so far are relative to the old maximum, so they go into o before it changes.
                if index > first {
                    self.accumulate(first..index, overwrite, scratch);
                    (first, overwrite) = (index, false);
                }
                fused = self.update_max(group, scale, overwrite, scratch);
            }
        }
        self.accumulate(first..groups.end, overwrite, scratch);
    }

    /// Updates the row maxima by a group, rescales, and computes the weights of the group. Returns whether the scale
    /// may still be fused: if not, this group is scaled here, and the following ones by `to_logits`.
    fn update_max(
        &self,
        group: Group,
        scale: f32,
        overwrite: bool,
        scratch: &mut Scratch<'_>,
    ) -> bool {
        self.rescale(group, scale, overwrite, scratch);
        let fused = self.can_fuse(scratch);
        let is_scaled = scale == 1.0;
        if !fused && !is_scaled {
            self.finish_logits(group, None, None, scratch);
        }
        let scale = if fused { scale } else { 1.0 };
        self.compute_weights(group, scale, true, scratch, ());
        fused
    }

    /// Starts the scores of a group. On AMX the products are returned, to be issued while another group becomes
    /// weights; otherwise the block holds the scores when this returns.
    fn scores(
        &self,
        group: usize,
        to: usize,
        scratch: &mut Scratch<'_>,
    ) -> Option<PendingScores<'a>> {
        let shape = self.walk.run.shape;
        let (parts, ld_qk) = (shape.bf16_parts, shape.ld_qk);
        let (k, q) = (SIDE * parts.kv * ld_qk, SIDE * parts.q * ld_qk);
        let k = scratch.tile.k16[group * k..][..k].as_ptr();
        let q = scratch.q16[self.rows.start / SIDE * q..][..q].as_ptr();
        let s = block(scratch.s, to).as_mut_ptr();
        match &self.walk.engine {
            Engine::Tiles(tiles, products) => Some(PendingScores {
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

    /// Whether the scale may be fused with the subtraction of the row maximum, for all rows of the strip.
    fn can_fuse(&self, scratch: &mut Scratch<'_>) -> bool {
        !strip(scratch.max, self.rows.start)
            .iter()
            .any(|&max| is_too_large_to_fuse(max))
    }

    /// Turns raw scores of a group into logits, up to a factor that is returned, and masks keys that a row does not
    /// see. Without `fused` the factor is 1.
    fn to_logits(&self, group: Group, fused: bool, scratch: &mut Scratch<'_>) -> f32 {
        let keys = group.index * SIDE..(group.index + 1) * SIDE;
        let slopes = self.walk.run.slopes(self.walk.item, self.walk.head);
        let bias = self.walk.run.bias(self.walk.item, &self.keys_of(group));
        let bent = self.logits.cap != 0.0 || slopes.is_some() || bias.is_some();
        let plain = fused && self.logits.scale > 0.0 && !bent;
        if !plain {
            self.finish_logits(group, slopes, bias, scratch);
        }
        if self.has_holes {
            self.mask_holes(group, scratch);
        } else if keys.start < self.open.start || keys.end > self.open.end {
            self.mask_range(group, scratch);
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

    /// The keys of a group that the tile has.
    fn keys_of(&self, group: Group) -> Range<i64> {
        let start = self.key(group);
        start..self.keys.end.min(start + SIDE as i64)
    }

    /// The query row that a row of the strip belongs to.
    fn token(&self, row: usize) -> i64 {
        self.walk.item.q_start + (row / self.walk.run.shape.group) as i64
    }

    /// Scale, soft cap, ALiBi and bias.
    fn finish_logits(
        &self,
        group: Group,
        slopes: Option<&[f32]>,
        bias: Option<Bias>,
        scratch: &mut Scratch<'_>,
    ) {
        let biases = bias.map(|bias| self.biases(&bias, group));
        let biases = biases.as_ref();
        let mut distances = [0.0; SIDE];
        let mut row_slopes = [0.0; SIDE];
        for (i, row) in self.rows.clone().enumerate() {
            let position = self.walk.item.mask.position(self.token(row));
            distances[i] = (position - self.key(group)) as f32;
            row_slopes[i] = slopes.map_or(0.0, |slopes| slopes[row % self.walk.run.shape.group]);
        }
        vectorize(&ToLogits {
            s: block(scratch.s, group.block).as_mut_ptr(),
            logits: self.logits,
            slopes: slopes.map_or(std::ptr::null(), |_| row_slopes.as_ptr()),
            distances: distances.as_ptr(),
            biases: biases.map_or(std::ptr::null(), |biases| biases.as_ptr()),
        });
    }

    /// What is added to the logits of a group, a row per key as scores are.
    fn biases(&self, bias: &Bias, group: Group) -> [f32; ELEMENTS] {
        let (run, keys) = (self.walk.run, self.keys_of(group));
        let mut rows = [0.0; ELEMENTS];
        for (row, to) in self.rows.clone().zip(rows.chunks_exact_mut(SIDE)) {
            let (token, member) = (row / run.shape.group, row % run.shape.group);
            let qo_head = self.walk.head * run.shape.group + member;
            bias.load(run.kernels, self.walk.item, (token, qo_head), &keys, to);
        }
        let mut biases = [0.0; ELEMENTS];
        to_rows(run, rows.as_ptr(), SIDE, &mut biases);
        biases
    }

    fn mask_range(&self, group: Group, scratch: &mut Scratch<'_>) {
        let start = self.key(group);
        let end = self.keys.end - start;
        let (mut low, mut high) = ([0.0; SIDE], [0.0; SIDE]);
        let mut visible = 0..0;
        for (i, row) in self.rows.clone().enumerate() {
            // The rows of a token are consecutive.
            if i == 0 || row.is_multiple_of(self.walk.run.shape.group) {
                visible = self.walk.item.mask.row(self.token(row));
            }
            low[i] = (visible.start - start) as f32;
            high[i] = (visible.end - start).min(end) as f32;
        }
        vectorize(&MaskRange {
            s: block(scratch.s, group.block).as_mut_ptr(),
            low: low.as_ptr(),
            high: high.as_ptr(),
        });
    }

    fn mask_holes(&self, group: Group, scratch: &mut Scratch<'_>) {
        let keys = self.keys_of(group);
        let s = block(scratch.s, group.block);
        let mut token = -1;
        for (i, row) in self.rows.clone().enumerate() {
            if self.token(row) != token {
                token = self.token(row);
                scratch.limits[..SIDE].fill(f32::NEG_INFINITY);
                self.walk
                    .item
                    .mask
                    .limits(token, keys.clone(), scratch.limits);
            }
            for (j, &limit) in scratch.limits[..SIDE].iter().enumerate() {
                if limit == f32::NEG_INFINITY {
                    s[j * SIDE + i] = limit;
                }
            }
        }
        // Rows beyond the item, and with them keys past the end of the tile, hold anything. They must not change a
        // maximum.
        for scores in s.chunks_exact_mut(SIDE) {
            scores[self.rows.len()..].fill(f32::NEG_INFINITY);
        }
    }

    /// Weights of a group of keys. Returns whether some row maximum has to be updated first, which is never the case
    /// with `max_is_final`.
    fn compute_weights<M: Interleaved>(
        &self,
        group: Group,
        scale: f32,
        max_is_final: bool,
        scratch: &mut Scratch<'_>,
        interleaved: M,
    ) -> bool {
        match self.walk.run.shape.bf16_parts.q {
            1 => self.compute_weights_in::<M, 1>(group, scale, max_is_final, scratch, interleaved),
            2 => self.compute_weights_in::<M, 2>(group, scale, max_is_final, scratch, interleaved),
            _ => self.compute_weights_in::<M, 3>(group, scale, max_is_final, scratch, interleaved),
        }
    }

    fn compute_weights_in<M: Interleaved, const PARTS: usize>(
        &self,
        group: Group,
        scale: f32,
        max_is_final: bool,
        scratch: &mut Scratch<'_>,
        interleaved: M,
    ) -> bool {
        let p = &mut scratch.p16[group.index * PARTS * ELEMENTS..][..PARTS * ELEMENTS];
        vectorize(&ComputeWeights::<M, PARTS> {
            s: block(scratch.s, group.block).as_ptr(),
            p: p.as_mut_ptr(),
            scale,
            max: strip(scratch.max, self.rows.start).as_ptr(),
            sum: strip(scratch.sum, self.rows.start).as_mut_ptr(),
            max_is_final,
            interleaved,
        })
    }

    fn rescale(&self, group: Group, scale: f32, overwrite: bool, scratch: &mut Scratch<'_>) {
        let ld = self.walk.run.shape.ld_vo;
        vectorize(&Rescale {
            s: block(scratch.s, group.block).as_ptr(),
            scale,
            max: strip(scratch.max, self.rows.start).as_mut_ptr(),
            sum: strip(scratch.sum, self.rows.start).as_mut_ptr(),
            o: scratch.o[self.rows.start * ld..][..SIDE * ld].as_mut_ptr(),
            dims: if overwrite { 0 } else { ld },
        });
    }

    /// `o += vᵀ · p`; with `overwrite`, `o = vᵀ · p`.
    fn accumulate(&self, groups: Range<usize>, overwrite: bool, scratch: &mut Scratch<'_>) {
        let ld = self.walk.run.shape.ld_vo;
        let parts = self.walk.run.shape.bf16_parts;
        let o = &mut scratch.o[self.rows.start * ld..][..SIDE * ld];
        let (all_v, all_p) = (
            groups.end * parts.kv * ELEMENTS,
            groups.end * parts.q * ELEMENTS,
        );
        let p = scratch.p16[..all_p].as_ptr();
        for column in (0..ld).step_by(SIDE) {
            let o = block(o, column / SIDE).as_mut_ptr();
            let first = pack::value_blocks(self.walk.run, column, 0);
            let v = scratch.tile.v16[first..][..all_v].as_ptr();
            // SAFETY: a block of o; the slices hold all blocks of the groups.
            unsafe {
                let v = v.add(groups.start * parts.kv * ELEMENTS);
                let p = p.add(groups.start * parts.q * ELEMENTS);
                match &self.walk.engine {
                    Engine::Tiles(tiles, products) => {
                        products.add_outputs(tiles, o, overwrite, (v, p), parts, groups.len());
                    }
                    Engine::Pairs => bf16_pairs::multiply(o, overwrite, v, p, groups.len()),
                }
            }
        }
    }
}

/// Work that is interleaved with the softmax of a group: each slot prefetches some lines of one kind, and issues
/// some products of the next group's scores.
struct InterleavedWork<'a> {
    prefetches: &'a [PrefetchShare<'a>; 4],
    paces: [usize; 4],
    next: Option<PendingScores<'a>>,
}

impl Interleaved for &InterleavedWork<'_> {
    #[inline(always)]
    fn advance(self, slot: usize) {
        let kind = slot % self.prefetches.len();
        // SAFETY: the offsets lie in the scratch, and stay as they are during the walk or the tile.
        unsafe {
            self.prefetches[kind]
                .prefetch
                .prefetch_lines(self.paces[kind], Avx512::LEVEL)
        };
        if let Some(next) = self.next {
            next.advance(slot);
        }
    }
}

/// Block `index` of a slice of blocks.
fn block<T>(all: &mut [T], index: usize) -> &mut [T] {
    &mut all[index * ELEMENTS..][..ELEMENTS]
}

/// The elements of a strip in an array with one per row.
fn strip(all: &mut [f32], first: usize) -> &mut [f32] {
    &mut all[first..][..SIDE]
}

/// Runs a task whose pointers are slices of the scratch, as large as its fields say.
fn vectorize<T: Task>(task: &T) -> T::Output {
    // SAFETY: both matrices come with AVX-512; the caller's slices.
    unsafe { Avx512::vectorize(task) }
}
