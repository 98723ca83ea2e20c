//! A work item in the terms of one run: its rows, its keys, and what its rows see of a tile of keys.

use super::mask::RequestMask;
use std::ops::Range;

/// A work item in the terms of this run.
pub struct Item<'a> {
    /// Index in the batch.
    pub request: usize,
    /// Where the request's page ids start; its first row where K and V are ragged.
    pub page_start: i64,
    /// First query row, counted within the request; first token, counted within the batch.
    pub q_start: i64,
    pub token: i64,
    pub tokens: usize,
    /// Query rows of a KV head: `tokens` times the group.
    pub rows: usize,
    /// The range of the keys that some row of the item sees.
    pub keys: Range<i64>,
    pub mask: RequestMask<'a>,
    /// First partial row, or [`crate::problem::NO_PARTIAL`].
    pub partial: u32,
}

impl Item<'_> {
    /// The part of the tile `keys` that some of `tokens` see, counted from the start of the tile. It begins with a
    /// multiple of `unit`.
    pub fn visible_to_any(
        &self,
        tokens: &Range<usize>,
        keys: &Range<i64>,
        unit: usize,
    ) -> Option<Range<usize>> {
        let row = |token: usize| self.q_start + token as i64;
        let span = self.mask.span(row(tokens.start)..row(tokens.end));
        let low = (span.start.max(keys.start) - keys.start) as usize / unit * unit;
        let end = span.end.min(keys.end) - keys.start;
        (end > low as i64).then_some(low..end as usize)
    }

    /// The part of the tile `keys` that all of `tokens` see, counted from the start of the tile, and whether the
    /// visible keys of some token are not one range.
    pub fn visible_to_all(&self, tokens: &Range<usize>, keys: &Range<i64>) -> (Range<usize>, bool) {
        let (mut start, mut end, mut has_holes) = (keys.start, keys.end, false);
        for token in tokens.clone() {
            let row = self.q_start + token as i64;
            let visible = self.mask.row(row);
            (start, end) = (start.max(visible.start), end.min(visible.end));
            has_holes |= self.mask.has_holes(row, keys);
        }
        let open = (start - keys.start) as usize..(end.max(start) - keys.start) as usize;
        (open, has_holes)
    }

    /// Whether every row of `tokens` sees all of `keys`.
    pub fn sees_all(&self, tokens: &Range<usize>, keys: &Range<i64>) -> bool {
        tokens.clone().all(|token| {
            let row = self.q_start + token as i64;
            let visible = self.mask.row(row);
            visible.start <= keys.start
                && visible.end >= keys.end
                && !self.mask.has_holes(row, keys)
        })
    }
}
