//! The tile of keys and values that comes next: its rows are asked for and then staged, some at a time, while
//! the present tile is computed. How they are staged is the walk's matter.
//!
//! A tile that is asked for as a whole before any of it is staged does not stay in the second-level cache. The
//! rows of one head lie a power of two apart, so those of a tile compete for few of its sets: of 8 heads, an eighth.
#![allow(unsafe_code)]

use super::item::Item;
use super::run::Run;
use super::scratch::Tile;
use crate::cpu::kernels::prefetch_rows::Ahead;
use std::ops::Range;

/// Units that are asked for beyond the one that is staged, where nothing is computed meanwhile.
const LEAD: usize = 2;

/// One head's rows of a tile.
pub struct Coming {
    /// Empty past the item's last key.
    pub keys: Range<i64>,
    pub k: Ahead,
    pub v: Ahead,
    /// Rows that are staged together.
    unit: usize,
    staged: usize,
}

impl Coming {
    /// At most `most` keys of an item, from `start` on. They are located in `tile`, whose offsets must stay.
    pub fn locate(
        run: &Run<'_>,
        item: &Item<'_>,
        head: usize,
        start: i64,
        (most, unit): (usize, usize),
        tile: &mut Tile<'_>,
    ) -> Coming {
        let keys = start..item.keys.end.min(start + most as i64);
        run.locate(item, &keys, tile);
        let count = count(&keys);
        let size = run.kv_dtype.size();
        let (k, v) = (&tile.k_offsets[..count], &tile.v_offsets[..count]);
        Coming {
            keys,
            k: Ahead::new(run.k.rows(head, k), run.shape.dim_qk * size),
            v: Ahead::new(run.v.rows(head, v), run.shape.dim_vo * size),
            unit,
            staged: 0,
        }
    }

    /// Whole units that were asked for and are not staged yet. The caller stages them.
    pub fn asked(&mut self) -> Range<usize> {
        let asked = self.k.asked().min(self.v.asked());
        let end = match asked == count(&self.keys) {
            true => asked,
            false => asked / self.unit * self.unit,
        };
        self.take(end)
    }

    /// The next unit, if one is left, with some more asked for. The caller stages it.
    pub fn next(&mut self) -> Option<Range<usize>> {
        let count = count(&self.keys);
        if self.staged == count {
            return None;
        }
        let lead = self.staged + LEAD * self.unit;
        for rows in [&self.k, &self.v] {
            // SAFETY: the offsets are those of the tile.
            unsafe { rows.ask_rows(lead.saturating_sub(rows.asked())) };
        }
        Some(self.take(count.min(self.staged + self.unit)))
    }

    fn take(&mut self, end: usize) -> Range<usize> {
        let start = self.staged;
        self.staged = end.max(start);
        start..self.staged
    }
}

fn count(keys: &Range<i64>) -> usize {
    (keys.end - keys.start) as usize
}
