//! A work item in the terms of one run, and which part of a tile of keys its rows see.

use super::mask::Sight;
use std::ops::Range;

/// A work item in the terms of this run.
pub struct Item<'a> {
    /// Where the request's page ids start; its first row where K and V are ragged.
    pub page_start: i64,
    /// First query row within the request, and within the batch.
    pub q_start: i64,
    pub token: i64,
    pub tokens: usize,
    /// `tokens` times the group.
    pub rows: usize,
    /// The keys of the item that any of its rows sees.
    pub keys: Range<i64>,
    pub sight: Sight<'a>,
    /// First partial row, or [`crate::problem::NO_PARTIAL`].
    pub partial: u32,
}

impl Item<'_> {
    /// The part of the tile `keys` that some of `tokens` see, from a multiple of `unit` on, counted from
    /// the tile's start.
    pub fn seen(
        &self,
        tokens: &Range<usize>,
        keys: &Range<i64>,
        unit: usize,
    ) -> Option<Range<usize>> {
        let row = |token: usize| self.q_start + token as i64;
        let hull = self.sight.hull(row(tokens.start)..row(tokens.end));
        let low = (hull.start.max(keys.start) - keys.start) as usize / unit * unit;
        let end = hull.end.min(keys.end) - keys.start;
        (end > low as i64).then_some(low..end as usize)
    }

    /// The part of the tile `keys` that each of `tokens` sees, counted from the tile's start, and whether
    /// some token sees less, or more, than its range says.
    pub fn open(&self, tokens: &Range<usize>, keys: &Range<i64>) -> (Range<usize>, bool) {
        let (mut start, mut end, mut has_holes) = (keys.start, keys.end, false);
        for token in tokens.clone() {
            let row = self.q_start + token as i64;
            let seen = self.sight.row(row);
            (start, end) = (start.max(seen.start), end.min(seen.end));
            has_holes |= self.sight.has_holes(row);
        }
        let open = (start - keys.start) as usize..(end.max(start) - keys.start) as usize;
        (open, has_holes)
    }

    /// Every row of `tokens` sees all of `keys`.
    pub fn sees_all(&self, tokens: &Range<usize>, keys: &Range<i64>) -> bool {
        tokens.clone().all(|token| {
            let row = self.q_start + token as i64;
            let seen = self.sight.row(row);
            seen.start <= keys.start && seen.end >= keys.end && !self.sight.has_holes(row)
        })
    }
}
