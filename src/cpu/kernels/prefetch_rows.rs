//! Prefetch of rows that will be read soon, spread over the steps of a kernel.
//!
//! A core keeps a few dozen requests in flight. Given more at once, it waits for them nearly as long as it would for
//! reads. So kernels prefetch a few lines at every step, while they compute something else.
#![allow(unsafe_code)]

use super::prefetch::{LINE, Level, prefetch_line};
use super::rows::Rows;
use std::cell::Cell;
use std::time::Instant;

/// Bytes per nanosecond above which a tile came from the second-level cache, on a thread with AMX: 30 to 50 were
/// seen from there, and 8 to 15 from memory.
const CACHED_BYTES_PER_NS: f64 = 20.0;

/// Rows that a kernel reads once, and the rows to prefetch meanwhile.
#[derive(Clone, Copy)]
pub struct RowsWithPrefetch {
    pub rows: Rows,
    pub prefetch: *const RowPrefetch,
}

/// Some rows, and how many of their lines were prefetched.
pub struct RowPrefetch {
    rows: Rows,
    /// Lines per row.
    lines: usize,
    /// The next row to begin, and in the row before it the next line and how many are left.
    row: Cell<usize>,
    at: Cell<*const u8>,
    left: Cell<usize>,
}

impl RowPrefetch {
    /// The first `bytes` of each row.
    pub fn new(rows: Rows, bytes: usize) -> RowPrefetch {
        RowPrefetch {
            rows,
            lines: bytes.div_ceil(LINE),
            row: Cell::new(0),
            at: Cell::new(std::ptr::null()),
            left: Cell::new(0),
        }
    }

    /// Lines to prefetch at each of `steps`, so that none is left afterwards.
    #[inline(always)]
    pub fn lines_per_step(&self, steps: usize) -> usize {
        let left = self.left.get() + (self.rows.count - self.row.get()) * self.lines;
        left.div_ceil(steps.max(1))
    }

    /// Prefetches some more lines. The level should be a constant: choosing it for every line takes 4 µs of the 32
    /// µs of a warm decode.
    ///
    /// # Safety
    /// The offsets of the rows must be readable.
    #[inline(always)]
    pub unsafe fn prefetch_lines(&self, lines: usize, level: Level) {
        for _ in 0..lines {
            if self.left.get() == 0 {
                if self.row.get() == self.rows.count {
                    return;
                }
                // SAFETY: the row is one of `count`.
                self.at.set(unsafe { self.rows.at_row(self.row.get()) });
                self.row.set(self.row.get() + 1);
                self.left.set(self.lines);
            }
            prefetch_line(self.at.get(), level);
            self.at.set(self.at.get().wrapping_add(LINE));
            self.left.set(self.left.get() - 1);
        }
    }

    /// Rows of which every line was prefetched.
    pub fn rows_done(&self) -> usize {
        self.row.get() - usize::from(self.left.get() > 0)
    }

    /// As [`RowPrefetch::lines_per_step`], but in whole rows, for longer steps.
    #[inline(always)]
    pub fn rows_per_step(&self, steps: usize) -> usize {
        (self.rows.count - self.row.get()).div_ceil(steps.max(1))
    }

    /// Prefetches some more rows.
    ///
    /// # Safety
    /// As for [`RowPrefetch::prefetch_lines`].
    #[inline(always)]
    pub unsafe fn prefetch_rows(&self, count: usize) {
        let first = self.row.get();
        let end = self.rows.count.min(first + count);
        for index in first..end {
            // SAFETY: the row is one of `count`.
            row(unsafe { self.rows.at_row(index) }, self.lines * LINE);
        }
        self.row.set(end);
    }
}

/// Lines to prefetch while one block of query rows is computed.
#[derive(Clone, Copy)]
pub struct PrefetchShare<'a> {
    pub prefetch: &'a RowPrefetch,
    pub lines: usize,
}

impl<'a> PrefetchShare<'a> {
    /// The lines of so many rows.
    pub fn rows(prefetch: &'a RowPrefetch, rows: usize) -> PrefetchShare<'a> {
        let lines = rows * prefetch.lines;
        PrefetchShare { prefetch, lines }
    }

    /// One of `blocks` equal shares of the rows that are left.
    pub fn share(prefetch: &'a RowPrefetch, blocks: usize) -> PrefetchShare<'a> {
        PrefetchShare::rows(prefetch, prefetch.rows_per_step(blocks))
    }

    /// The same share where `wanted`, and no line elsewhere.
    pub fn when(self, wanted: bool) -> PrefetchShare<'a> {
        match wanted {
            true => self,
            false => PrefetchShare { lines: 0, ..self },
        }
    }
}

/// Whether a walk prefetches, decided by how fast its tiles are computed. On processors with AMX, prefetching rows
/// that are in the second-level cache takes about as long as reading them: 512 keys take 41 µs with it on an Emerald
/// Rapids, and 35 µs without. On Zen 4 it takes nearly no time. Its third-level cache, for which prefetching does
/// pay, cannot be told from the second by speed.
#[derive(PartialEq)]
pub enum PrefetchPolicy {
    /// Nothing is known yet, so the walk prefetches.
    Measuring,
    /// All tiles came from the second-level cache.
    Cached,
    /// A tile did not, so the following ones will not either.
    Uncached,
}

impl PrefetchPolicy {
    pub fn new(amx: bool) -> PrefetchPolicy {
        if amx {
            PrefetchPolicy::Measuring
        } else {
            PrefetchPolicy::Uncached
        }
    }

    /// Computes a tile of so many bytes. `tile` is told whether to prefetch.
    pub fn compute(&mut self, bytes: usize, tile: impl FnOnce(bool)) {
        if *self == PrefetchPolicy::Uncached {
            return tile(true);
        }
        let start = Instant::now();
        tile(*self == PrefetchPolicy::Measuring);
        let near = bytes as f64 >= CACHED_BYTES_PER_NS * start.elapsed().as_nanos() as f64;
        *self = if near {
            PrefetchPolicy::Cached
        } else {
            PrefetchPolicy::Uncached
        };
    }
}

/// Prefetches `bytes` from the start of a row.
#[inline(always)]
fn row(start: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(LINE) {
        prefetch_line(start.wrapping_add(line), Level::Second);
    }
}
