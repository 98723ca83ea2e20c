//! The scratch memory of a thread: its part of the workspace, as slices that one walk needs. `shape` computes their sizes.
#![allow(unsafe_code)]

use super::shape::{Layouts, ScratchLayout};
use std::ops::Range;

/// A thread's part of the workspace.
pub struct ThreadMemory<'a> {
    layouts: &'a Layouts,
    base: *mut u8,
}

impl ThreadMemory<'_> {
    /// # Safety
    /// `base` must be aligned to a cache line and valid for `layouts.total` bytes that nobody else uses while this lives.
    pub unsafe fn new(layouts: &Layouts, base: *mut u8) -> ThreadMemory<'_> {
        ThreadMemory { layouts, base }
    }

    /// As `few_rows` uses it.
    pub fn few(&mut self) -> Scratch<'_> {
        self.scratch(&self.layouts.few)
    }

    /// As `many_rows` uses it.
    pub fn many(&mut self) -> Scratch<'_> {
        self.scratch(&self.layouts.many)
    }

    /// As `many_rows_bf16` uses it.
    #[cfg(folio_avx512)]
    pub fn blocks(&mut self) -> Scratch<'_> {
        self.scratch(&self.layouts.blocks)
    }

    /// As combining uses it.
    pub fn combine(&mut self) -> Scratch<'_> {
        self.scratch(&self.layouts.combine)
    }

    /// Takes `&mut self` by its callers, so there is one at a time.
    fn scratch(&self, layout: &ScratchLayout) -> Scratch<'_> {
        // SAFETY: the promise of `new`; no layout is larger than the largest.
        unsafe { Scratch::new(layout, self.base) }
    }
}

/// Memory that the walks compute in. [`ScratchLayout`] says what each part holds.
pub struct Scratch<'a> {
    pub q: &'a mut [f32],
    pub o: &'a mut [f32],
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub alpha: &'a mut [f32],
    pub s: &'a mut [f32],
    pub staged: &'a mut [f32],
    pub values: &'a mut [f32],
    pub q16: &'a mut [u16],
    pub p16: &'a mut [u16],
    pub staged16: &'a mut [u16],
    pub limits: &'a mut [f32],
    pub biases: &'a mut [f32],
    pub q_offsets: &'a mut [i64],
    pub o_offsets: &'a mut [i64],
    /// Bytes of copied query rows.
    pub q_rows: *mut u8,
    pub joined: Joined<'a>,
    pub tile: Tile<'a>,
    pub next_tile: Tile<'a>,
}

/// Keys in two parts, joined, and their byte offsets.
pub struct Joined<'a> {
    pub rows: &'a mut [u8],
    pub offsets: &'a mut [i64],
}

/// A tile of keys and values: byte offsets of the rows, and their staged or packed copies.
pub struct Tile<'a> {
    pub k_offsets: &'a mut [i64],
    pub k_rope_offsets: &'a mut [i64],
    pub v_offsets: &'a mut [i64],
    pub k: &'a mut [f32],
    pub v: &'a mut [f32],
    pub k16: &'a mut [u16],
    pub v16: &'a mut [u16],
    /// Bytes of copied rows, which `k_offsets` and `v_offsets` then name.
    pub rows: *mut u8,
}

impl<'a> Scratch<'a> {
    /// # Safety
    /// `base` must be aligned to a cache line and valid for `layout.total` bytes that nobody else uses
    /// during `'a`.
    unsafe fn new(layout: &ScratchLayout, base: *mut u8) -> Scratch<'a> {
        // SAFETY: the ranges are disjoint, lie within `total` and start on cache lines; any bits are a
        // float or an integer.
        unsafe {
            let floats = |part: &Range<usize>| {
                std::slice::from_raw_parts_mut(base.add(part.start).cast::<f32>(), part.len() / 4)
            };
            let halves = |part: &Range<usize>| {
                std::slice::from_raw_parts_mut(base.add(part.start).cast::<u16>(), part.len() / 2)
            };
            let integers = |part: &Range<usize>| {
                std::slice::from_raw_parts_mut(base.add(part.start).cast::<i64>(), part.len() / 8)
            };
            let tile = |index: usize| Tile {
                k_offsets: integers(&half(&layout.k_offsets, index)),
                k_rope_offsets: integers(&half(&layout.k_rope_offsets, index)),
                v_offsets: integers(&half(&layout.v_offsets, index)),
                k: floats(&half(&layout.k, index)),
                v: floats(&half(&layout.v, index)),
                k16: halves(&half(&layout.k16, index)),
                v16: halves(&half(&layout.v16, index)),
                rows: base.add(half(&layout.rows, index).start),
            };
            Scratch {
                q: floats(&layout.q),
                o: floats(&layout.o),
                max: floats(&layout.max),
                sum: floats(&layout.sum),
                alpha: floats(&layout.alpha),
                s: floats(&layout.s),
                staged: floats(&layout.staged),
                values: floats(&layout.values),
                q16: halves(&layout.q16),
                p16: halves(&layout.p16),
                staged16: halves(&layout.staged16),
                limits: floats(&layout.limits),
                biases: floats(&layout.biases),
                q_offsets: integers(&layout.q_offsets),
                o_offsets: integers(&layout.o_offsets),
                q_rows: base.add(layout.q_rows.start),
                joined: Joined {
                    rows: std::slice::from_raw_parts_mut(
                        base.add(layout.joined.start),
                        layout.joined.len(),
                    ),
                    offsets: integers(&layout.joined_offsets),
                },
                tile: tile(0),
                next_tile: tile(1),
            }
        }
    }
}

/// One of two equal parts.
fn half(part: &Range<usize>, index: usize) -> Range<usize> {
    let len = part.len() / 2;
    part.start + index * len..part.start + (index + 1) * len
}
