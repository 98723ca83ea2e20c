//! The size of the chunks that `cut` cuts keys into. One size serves the whole batch: the smallest multiple of
//! `kv_unit` for which the splits, Σ tiles · (⌈kv_len / chunk⌉ − 1), stay within a budget. So the longest request bounds
//! the tail, few long requests are split finely, and many requests not at all. With budget S, n tiles and
//! K = Σ tiles · kv_len, K / (S + n) ≤ chunk ≤ K / S: the bisection is short. A tile that is split m ≥ 2
//! ways has m partial results and m − 1 splits, so at most 2 · S tiles' rows of partial results exist, and by the budget
//! no more than `max_splits` tiles' rows.
//!
//! **Budget.** `max_splits` less the tiles, so that all items together come to `max_splits`, which is what
//! runs at a time: a few items more than that cost a second wave (8 requests of 8192 keys on an H200:
//! 78.7 µs in 32 items, 87.1 in 40). But no less than half, for one long request among many.
//!
//! **Gain.** Nothing is split where chunks spare a tile of the longest request no more than `Tiling::least_gain`, since combining takes
//! longer (374 rows on the last 1024 keys and six decodes, head_dim 72, on an H200: 48 µs in chunks of ten units and three,
//! 31 whole). Where rows are wide, it takes the longer, the more there are: `Tiling::rows_of_unit`.
//!
//! **Fair share.** Where that chunk is still much longer than K / `max_splits`, which each of the items that run at a time
//! would have if all ended together, the chunk is as near to this as `max_splits` chunks of split tiles allow. Short
//! requests then fill the time after the first chunks, and are not counted (one request of 200k keys among 31 of 2k: 25
//! chunks of 8k, where half of the budget makes 17 of 12k).

use super::divisor::Divisor;
use crate::problem::{HostBatch, Tiling};

/// A longest request of so many units is not split: putting the rows together again costs more.
pub const UNITS_NOT_SPLIT: u32 = 2;

/// The chunk size of a batch; `u32::MAX` where nothing is split.
pub(super) fn smallest_chunk(batch: &HostBatch<'_>, tiling: &Tiling) -> u32 {
    let unit = tiling.kv_unit;
    let num_keys = |b| batch.num_keys_in_window(b, unit);
    let planned = (0..batch.batch_size()).filter(|&b| batch.planned_rows(b) > 0);
    let longest = planned.map(num_keys).max();
    let longest = longest.unwrap_or(0);
    let most_units = longest.div_ceil(unit).max(1);
    let whole = most_units.saturating_mul(unit);
    if most_units <= UNITS_NOT_SPLIT || whole < longest {
        return u32::MAX;
    }
    let q_tile = Divisor::new(tiling.q_tile);
    let (mut tiles, mut tile_keys, mut rows) = (0u64, 0u64, 0u32);
    for b in 0..batch.batch_size() {
        let n = u64::from(q_tile.divide_up(batch.planned_rows(b)));
        rows = rows.max(batch.planned_rows(b).min(tiling.q_tile));
        tiles += n;
        tile_keys += n * u64::from(num_keys(b));
    }
    let splits = split_budget(tiling.max_splits, tiles);
    if splits == 0 {
        return u32::MAX;
    }
    let units = |share: u64| share.clamp(1, u64::from(most_units)) as u32;
    let unit64 = u64::from(unit);
    let least = units(tile_keys / ((splits + tiles) * unit64));
    let enough = units(tile_keys.div_ceil(splits * unit64));
    let by_splits = smallest_that_fits(batch, tiling, least, enough, Limit::Splits(splits));
    let most = u64::from(tiling.max_splits);
    let fair = units(tile_keys.div_ceil(most * unit64));
    let mut chunk = by_splits;
    if is_much_longer(by_splits, fair) {
        let by_share = smallest_that_fits(batch, tiling, fair, by_splits, Limit::Chunks(most));
        if is_much_longer(by_splits, by_share) {
            chunk = by_share;
        }
    }
    let whole = most_units_of_tile(batch, tiling, most_units);
    match chunk.saturating_add(least_gain(tiling, tiles * u64::from(rows))) < whole {
        true => chunk * unit,
        false => u32::MAX,
    }
}

/// Units that chunks of tiles of so many rows are to spare the longest request.
fn least_gain(tiling: &Tiling, rows: u64) -> u32 {
    let combining = rows.checked_div(tiling.rows_of_unit.into());
    let combining = u32::try_from(combining.unwrap_or(0)).unwrap_or(u32::MAX);
    tiling.least_gain.saturating_add(combining)
}

/// Units that a tile of the longest request sees, of which there are so many.
fn most_units_of_tile(batch: &HostBatch<'_>, tiling: &Tiling, most_units: u32) -> u32 {
    let seen = batch.most_seen(u32::MAX, tiling.q_tile);
    // They may begin within a unit.
    most_units.min(seen.div_ceil(tiling.kv_unit).saturating_add(1))
}

/// By an eighth: what ends late has the memory to itself, so that less does not show.
fn is_much_longer(chunk: u32, than: u32) -> bool {
    8 * u64::from(chunk) > 9 * u64::from(than)
}

/// Units of the smallest chunk from `low` on that keeps to a limit, where `high` is enough or the last resort.
fn smallest_that_fits(
    batch: &HostBatch<'_>,
    tiling: &Tiling,
    mut low: u32,
    mut high: u32,
    limit: Limit,
) -> u32 {
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(batch, tiling, middle * tiling.kv_unit, limit) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    high
}

/// What chunks of one size are kept to.
#[derive(Clone, Copy)]
enum Limit {
    /// So many splits.
    Splits(u64),
    /// So many chunks of tiles that are split.
    Chunks(u64),
}

/// Splits that a batch of so many tiles may make.
pub(super) fn split_budget(max_splits: u32, tiles: u64) -> u64 {
    let max_splits = u64::from(max_splits);
    max_splits.saturating_sub(tiles).max(max_splits / 2)
}

/// Whether chunks of this size keep to the limit.
fn fits(batch: &HostBatch<'_>, tiling: &Tiling, chunk: u32, limit: Limit) -> bool {
    let (chunk, q_tile) = (Divisor::new(chunk), Divisor::new(tiling.q_tile));
    let (not_counted, most) = match limit {
        Limit::Splits(most) => (1, most),
        Limit::Chunks(most) => (0, most),
    };
    let mut counted = 0;
    (0..batch.batch_size()).all(|b| {
        let tiles = u64::from(q_tile.divide_up(batch.planned_rows(b)));
        let chunks = chunk.divide_up(batch.num_keys_in_window(b, tiling.kv_unit));
        if chunks > 1 {
            counted += tiles * u64::from(chunks - not_counted);
        }
        counted <= most
    })
}
