//! Rows of a tensor as addresses: a base and a byte offset per row. A kernel that takes [`Rows`] knows nothing of
//! pages, layouts or strides. Nothing here reads a row.
#![allow(unsafe_code)]

use std::ops::Range;

/// Rows in memory: row `j` starts at `base + offsets[j]`, in bytes.
#[derive(Clone, Copy)]
pub struct Rows {
    pub base: *const u8,
    pub offsets: *const i64,
    pub count: usize,
}

impl Rows {
    /// The rows from `first` on, if there are so many.
    pub fn skip(&self, first: usize) -> Rows {
        let first = first.min(self.count);
        Rows {
            base: self.base,
            offsets: self.offsets.wrapping_add(first),
            count: self.count - first,
        }
    }

    /// Some of the rows.
    pub fn part(&self, range: Range<usize>) -> Rows {
        let mut rows = self.skip(range.start);
        rows.count = rows.count.min(range.len());
        rows
    }

    /// Start of row `j`. Rows of a merge lie in several tensors and have no base: the offset may leave
    /// every allocation.
    ///
    /// # Safety
    /// `j` must be below `count`.
    #[inline(always)]
    pub unsafe fn at_row(&self, j: usize) -> *const u8 {
        // SAFETY: the caller's promise; there is an offset for each of `count` rows.
        let offset = unsafe { *self.offsets.add(j) };
        self.base.wrapping_offset(offset as isize)
    }
}
