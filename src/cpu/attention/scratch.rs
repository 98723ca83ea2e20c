//! A thread's scratch as slices over its part of the workspace.
#![allow(unsafe_code)]

use super::shape::Scratch;
use std::ops::Range;

/// What the walks compute in. [`Scratch`] says what each part holds.
pub struct Pad<'a> {
    pub q: &'a mut [f32],
    pub o: &'a mut [f32],
    pub max: &'a mut [f32],
    pub sum: &'a mut [f32],
    pub alpha: &'a mut [f32],
    pub s: &'a mut [f32],
    pub staged: &'a mut [f32],
    pub q16: &'a mut [u16],
    pub p16: &'a mut [u16],
    pub staged16: &'a mut [u16],
    pub limits: &'a mut [f32],
    pub q_offsets: &'a mut [i64],
    pub o_offsets: &'a mut [i64],
    pub here: Tile<'a>,
    pub next: Tile<'a>,
}

/// A tile of keys and values: byte offsets of the rows, and what they are staged as.
pub struct Tile<'a> {
    pub k_offsets: &'a mut [i64],
    pub v_offsets: &'a mut [i64],
    pub k: &'a mut [f32],
    pub v: &'a mut [f32],
    pub k16: &'a mut [u16],
    pub v16: &'a mut [u16],
}

impl<'a> Pad<'a> {
    /// # Safety
    /// `base` must be aligned to a cache line and valid for `scratch.total` bytes that nobody else uses
    /// during `'a`.
    pub unsafe fn new(scratch: &Scratch, base: *mut u8) -> Pad<'a> {
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
                k_offsets: integers(&half(&scratch.k_offsets, index)),
                v_offsets: integers(&half(&scratch.v_offsets, index)),
                k: floats(&half(&scratch.k, index)),
                v: floats(&half(&scratch.v, index)),
                k16: halves(&half(&scratch.k16, index)),
                v16: halves(&half(&scratch.v16, index)),
            };
            Pad {
                q: floats(&scratch.q),
                o: floats(&scratch.o),
                max: floats(&scratch.max),
                sum: floats(&scratch.sum),
                alpha: floats(&scratch.alpha),
                s: floats(&scratch.s),
                staged: floats(&scratch.staged),
                q16: halves(&scratch.q16),
                p16: halves(&scratch.p16),
                staged16: halves(&scratch.staged16),
                limits: floats(&scratch.limits),
                q_offsets: integers(&scratch.q_offsets),
                o_offsets: integers(&scratch.o_offsets),
                here: tile(0),
                next: tile(1),
            }
        }
    }
}

/// One of two equal parts.
fn half(part: &Range<usize>, index: usize) -> Range<usize> {
    let len = part.len() / 2;
    part.start + index * len..part.start + (index + 1) * len
}
