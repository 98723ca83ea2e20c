//! The next tile of keys and values. Its rows are prefetched and then staged, some at a time, while the present tile
//! is computed. The walk decides how they are staged.
//!
//! A tile must not be prefetched as a whole before any of it is staged, because it would not stay in the
//! second-level cache. The rows of one head lie a power of two apart, so they compete for few sets of the cache:
//! with 8 heads, for one eighth.
#![allow(unsafe_code)]

use super::item::Item;
use super::run::Run;
use super::scratch::Tile;
use crate::cpu::kernels::prefetch_rows::RowPrefetch;
use std::ops::Range;

/// Units that are prefetched beyond the one that is staged, where nothing is computed meanwhile.
const LEAD: usize = 2;

/// One head's rows of a tile.
pub struct NextTile {
    /// Empty past the item's last key.
    pub keys: Range<i64>,
    pub k: RowPrefetch,
    pub v: RowPrefetch,
    /// Rows that are staged together, but for the last ones.
    unit: usize,
    staged: usize,
}

impl NextTile {
    /// At most `most` keys of an item, from `start` on. Their offsets are written to `tile` and must stay there.
    pub fn locate(
        run: &Run<'_>,
        item: &Item<'_>,
        head: usize,
        start: i64,
        (most, unit): (usize, usize),
        tile: &mut Tile<'_>,
    ) -> NextTile {
        let keys = start..item.keys.end.min(start + most as i64);
        run.locate(item, &(head..head + 1), &keys, tile);
        let count = count(&keys);
        let (k, v) = (&tile.k_offsets[..count], &tile.v_offsets[..count]);
        NextTile {
            keys,
            k: RowPrefetch::new(run.k.cache.rows(head, k), run.k.row_bytes),
            v: RowPrefetch::new(run.v.rows(head, v), run.shape.v_row_bytes),
            unit,
            staged: 0,
        }
    }

    /// Takes the whole units that are prefetched and not staged yet. The caller stages them.
    pub fn take_prefetched(&mut self) -> Range<usize> {
        let prefetched = self.k.rows_done().min(self.v.rows_done());
        let end = match prefetched == count(&self.keys) {
            true => prefetched,
            false => prefetched / self.unit * self.unit,
        };
        self.take(end)
    }

    /// Takes the next unit, if one is left, and prefetches some more. The caller stages it.
    pub fn take_next(&mut self) -> Option<Range<usize>> {
        let count = count(&self.keys);
        if self.staged == count {
            return None;
        }
        let lead = self.staged + LEAD * self.unit;
        for rows in [&self.k, &self.v] {
            // SAFETY: the offsets are those of the tile.
            unsafe { rows.prefetch_rows(lead.saturating_sub(rows.rows_done())) };
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
