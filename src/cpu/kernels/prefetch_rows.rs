//! Prefetch of rows that will be read soon, spread over the steps of a kernel.
//!
//! A core keeps a few dozen requests in flight. Given more at once, it waits for them nearly as long as it would for
//! reads. So kernels prefetch a few lines at every step, while they compute something else.
#![allow(unsafe_code)]

use super::prefetch::{LINE, Level, hint};
use super::rows::Rows;
use std::cell::Cell;
use std::time::Instant;

/// Bytes per nanosecond that a thread with AMX computes from its second-level cache: 30 to 50 were seen, and 8
/// to 15 from memory.
const NEAR: f64 = 20.0;

/// Rows in the cache, read once, and what to ask for meanwhile.
#[derive(Clone, Copy)]
pub struct Streamed {
    pub rows: Rows,
    pub ahead: *const Ahead,
}

/// Lines of some rows that have not been asked for yet.
pub struct Ahead {
    rows: Rows,
    /// Lines of a row.
    lines: usize,
    /// The next row, and where in the one before it the next line lies.
    row: Cell<usize>,
    at: Cell<*const u8>,
    left: Cell<usize>,
}

impl Ahead {
    /// The first `bytes` of each row.
    pub fn new(rows: Rows, bytes: usize) -> Ahead {
        Ahead {
            rows,
            lines: bytes.div_ceil(LINE),
            row: Cell::new(0),
            at: Cell::new(std::ptr::null()),
            left: Cell::new(0),
        }
    }

    /// Lines per step, so that nothing is left after `steps`.
    #[inline(always)]
    pub fn share(&self, steps: usize) -> usize {
        let left = self.left.get() + (self.rows.count - self.row.get()) * self.lines;
        left.div_ceil(steps.max(1))
    }

    /// Asks for some more lines. The level should be a constant: to pick it for every line takes 4 µs of a warm
    /// decode's 32.
    ///
    /// # Safety
    /// The offsets of the rows must be readable.
    #[inline(always)]
    pub unsafe fn ask(&self, lines: usize, level: Level) {
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
            hint(self.at.get(), level);
            self.at.set(self.at.get().wrapping_add(LINE));
            self.left.set(self.left.get() - 1);
        }
    }

    /// Rows of which every line was asked for.
    pub fn asked(&self) -> usize {
        self.row.get() - usize::from(self.left.get() > 0)
    }

    /// As [`Ahead::share`], in rows: for steps that take longer.
    #[inline(always)]
    pub fn share_rows(&self, steps: usize) -> usize {
        (self.rows.count - self.row.get()).div_ceil(steps.max(1))
    }

    /// Asks for some more rows.
    ///
    /// # Safety
    /// As for [`Ahead::ask`].
    #[inline(always)]
    pub unsafe fn ask_rows(&self, count: usize) {
        let first = self.row.get();
        let end = self.rows.count.min(first + count);
        for index in first..end {
            // SAFETY: the row is one of `count`.
            row(unsafe { self.rows.at_row(index) }, self.lines * LINE);
        }
        self.row.set(end);
    }
}

/// Lines to ask for while one block of query rows is computed.
#[derive(Clone, Copy)]
pub struct Due<'a> {
    pub ahead: &'a Ahead,
    pub lines: usize,
}

impl<'a> Due<'a> {
    /// Those of so many rows.
    pub fn rows(ahead: &'a Ahead, rows: usize) -> Due<'a> {
        let lines = rows * ahead.lines;
        Due { ahead, lines }
    }

    /// One of so many equal shares of what is left.
    pub fn share(ahead: &'a Ahead, blocks: usize) -> Due<'a> {
        Due::rows(ahead, ahead.share_rows(blocks))
    }

    /// The same where it is wanted; else none.
    pub fn when(self, wanted: bool) -> Due<'a> {
        match wanted {
            true => self,
            false => Due { lines: 0, ..self },
        }
    }
}

/// Whether a walk needs to ask ahead, judged by how fast its tiles come. On processors with AMX, asking for what
/// is near already takes as long as reading it: 512 keys in the second-level cache of an Emerald Rapids take
/// 41 µs, and 35 without. Zen 4 asks for nearly nothing, and its third-level cache, for which asking does
/// pay, is too fast to be told from the second.
#[derive(PartialEq)]
pub enum Need {
    /// Nothing is known; it asks.
    Open,
    /// All tiles were near.
    Near,
    /// One was not; what follows it will not be either.
    Far,
}

impl Need {
    pub fn new(amx: bool) -> Need {
        if amx { Need::Open } else { Need::Far }
    }

    /// Computes a tile of so many bytes; `tile` is told whether to ask ahead.
    pub fn watch(&mut self, bytes: usize, tile: impl FnOnce(bool)) {
        if *self == Need::Far {
            return tile(true);
        }
        let start = Instant::now();
        tile(*self == Need::Open);
        let near = bytes as f64 >= NEAR * start.elapsed().as_nanos() as f64;
        *self = if near { Need::Near } else { Need::Far };
    }
}

/// Asks for `bytes` from the start of a row.
#[inline(always)]
fn row(start: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(LINE) {
        hint(start.wrapping_add(line), Level::Second);
    }
}
