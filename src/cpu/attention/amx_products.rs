//! The products of `many_rows_bf16` on AMX: which blocks are multiplied in which order, and how the products of the
//! next scores are interleaved with the softmax of the present ones.
#![allow(unsafe_code)]

use super::shape::{Bf16Parts, MAX_DIM_QK};
use crate::cpu::kernels::bf16_block::{ELEMENTS, SIDE};
use crate::cpu::kernels::bf16_split::{self, Terms};
use crate::cpu::kernels::transposed_softmax::SLOTS;
use crate::cpu::x86::amx::Tiles;

/// The slot in which scores are stored.
const STORE_SLOT: usize = SLOTS - 3;

/// One product of a block of A and a block of B: the offset of each, or `None` for the block that is still in its
/// tiles.
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

/// The products of blocks that make up one sum, at most `N`.
pub struct Blocks<const N: usize> {
    steps: [Step; N],
    count: usize,
    /// The products of slot `i` are from cut `i` to the next cut.
    cuts: [usize; SLOTS + 1],
}

/// Most products that the scores of a group take.
const SCORE_STEPS: usize = MAX_DIM_QK / SIDE * bf16_split::MAX_TERMS;

impl<const N: usize> Blocks<N> {
    /// All `terms` at each of `depth` blocks. The parts of a block are contiguous.
    fn new(terms: &Terms, (a_parts, b_parts): (usize, usize), depth: usize) -> Blocks<N> {
        let mut steps = [Step::default(); N];
        let mut last = (None, None);
        let pairs = (0..depth).flat_map(|d| terms.pairs().iter().map(move |pair| (d, pair)));
        let mut count = 0;
        for (d, (a, b)) in pairs {
            let (a, b) = (
                Some((d * a_parts + a) * ELEMENTS),
                Some((d * b_parts + b) * ELEMENTS),
            );
            steps[count] = Step {
                a: a.filter(|_| a != last.0),
                b: b.filter(|_| b != last.1),
            };
            last = (a, b);
            count += 1;
        }
        // Products are issued early, so that they have finished when the scores are stored.
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
pub struct Products {
    /// Of a group's keys and a strip's queries.
    pub scores: Blocks<SCORE_STEPS>,
    /// Of 32 columns of a group's values, and its weights.
    outputs: Blocks<{ bf16_split::MAX_TERMS }>,
}

impl Products {
    pub fn new(parts: Bf16Parts, ld_qk: usize) -> Products {
        let Bf16Parts { q, kv } = parts;
        let scores = Terms::new(kv, q, bf16_split::MAX_PARTS);
        let outputs = Terms::new(kv, q, q);
        Products {
            scores: Blocks::new(&scores, (kv, q), ld_qk / SIDE),
            outputs: Blocks::new(&outputs, (kv, q), 1),
        }
    }

    /// `o += vᵀ · p` over so many groups; with `overwrite`, `o = vᵀ · p`.
    ///
    /// # Safety
    /// `o` must be a block, and `v` and `p` hold the blocks of the groups.
    #[inline]
    pub unsafe fn add_outputs(
        &self,
        tiles: &Tiles,
        o: *mut f32,
        overwrite: bool,
        (v, p): (*const u16, *const u16),
        parts: Bf16Parts,
        groups: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if overwrite {
                tiles.zero();
            } else {
                tiles.load(o);
            }
            for group in 0..groups {
                let v = v.add(group * parts.kv * ELEMENTS);
                let p = p.add(group * parts.q * ELEMENTS);
                for step in self.outputs.all() {
                    step.multiply(tiles, v, p);
                }
            }
            tiles.store(o);
        }
    }
}

/// The products of the scores of one group, in steps.
#[derive(Clone, Copy)]
pub struct PendingScores<'a> {
    pub tiles: &'a Tiles,
    pub k: *const u16,
    pub q: *const u16,
    pub s: *mut f32,
    pub products: &'a Blocks<SCORE_STEPS>,
}

impl PendingScores<'_> {
    /// Issues the products of a slot. The scores are stored some slots after the last product.
    #[inline(always)]
    pub fn advance(&self, slot: usize) {
        let Blocks { steps, cuts, .. } = self.products;
        let prefetches = &steps[cuts[slot]..cuts[slot + 1]];
        // SAFETY: `k` and `q` hold the blocks, `s` holds one.
        unsafe {
            if slot == 0 {
                self.tiles.zero();
            }
            for step in prefetches {
                step.multiply(self.tiles, self.k, self.q);
            }
            if slot == STORE_SLOT {
                self.tiles.store(self.s);
            }
        }
    }
}
