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
    /// How many of the keys in a range a causal mask leaves to the last row.
    pub fn seen(&self, keys: &Range<u32>) -> u32 {
        let last = self.past + i64::from(self.q_start + self.q_len);
        (i64::from(keys.end).min(last) - i64::from(keys.start)).max(0) as u32
    }
}

/// The tiles of request `b`.
pub(super) fn tiles_of(
    batch: &HostBatch<'_>,
    b: usize,
    tiling: &Tiling,
) -> impl Iterator<Item = Tile> {
    let (qo_len, q_tile, unit) = (batch.planned_rows(b), tiling.q_tile, tiling.kv_unit);
    let past = i64::from(batch.kv_len[b]) - i64::from(qo_len);
    let keys_of_request = batch.num_keys_in_window(b, unit);
    (0..qo_len)
        .step_by(q_tile as usize)
        .map(move |q_start| Tile {
            request: b,
            q_start,
            q_len: q_tile.min(qo_len - q_start),
            keys: batch.keys_in_window(b, q_start, unit),
            keys_of_request,
            past,
        })
}

/// All tiles of a batch.
pub(super) fn tiles(batch: &HostBatch<'_>, tiling: &Tiling) -> impl Iterator<Item = Tile> {
    (0..batch.batch_size()).flat_map(move |b| tiles_of(batch, b, tiling))
}
