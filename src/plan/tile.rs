//! The tiles of a batch: query rows of one request that an item takes together, before their keys are cut.

use crate::problem::{HostBatch, Tiling};
use std::ops::Range;

/// Query rows of one request.
#[derive(Debug, Clone)]
pub(super) struct Tile {
    pub request: usize,
    pub q_start: u32,
    pub q_len: u32,
    /// Keys of its items.
    pub keys: Range<u32>,
    /// Those of the request's first tile.
    pub keys_of_request: u32,
    /// Position of the request's first row.
    pub past: i64,
}

impl Tile {
    /// That of request `b` which begins with its row `q_start`.
    #[inline]
    pub fn of(batch: &HostBatch<'_>, b: usize, q_start: u32, tiling: &Tiling) -> Tile {
        let qo_len = batch.planned_rows(b);
        Tile {
            request: b,
            q_start,
            q_len: tiling.q_tile.min(qo_len - q_start),
            keys: batch.keys_in_window(b, q_start, tiling.kv_unit),
            keys_of_request: batch.num_keys_in_window(b, tiling.kv_unit),
            past: i64::from(batch.kv_len[b]) - i64::from(qo_len),
        }
    }

    /// How many of the keys in a range a causal mask leaves to the last row.
    #[inline]
    pub fn seen(&self, keys: &Range<u32>) -> u32 {
        let last = self.past + i64::from(self.q_start + self.q_len);
        (i64::from(keys.end).min(last) - i64::from(keys.start)).max(0) as u32
    }
}

/// All tiles of a batch.
pub(super) fn tiles(batch: &HostBatch<'_>, tiling: &Tiling) -> impl Iterator<Item = Tile> {
    let of_request = move |b| {
        let first_rows = (0..batch.planned_rows(b)).step_by(tiling.q_tile as usize);
        first_rows.map(move |q_start| Tile::of(batch, b, q_start, tiling))
    };
    (0..batch.batch_size()).flat_map(of_request)
}
