//! Where the keys of a batch's tiles are cut: into chunks of one size (`chunk_size`), or where equal shares of the batch end
//! (`shares`), and which of the two. What comes of it, items and their parts, is `schedule`'s.
//!
//! Chunks are cheap to combine. Shares are for batches of few and long items, decode and MLA, that chunks would leave
//! unbalanced.

use super::chunk_size::smallest_chunk;
use super::divisor::Divisor;
use super::shares::{Shares, units_of_tile};
use crate::problem::{AttentionDesc, HostBatch, Tiling};
use std::ops::Range;

/// Where the keys of a tile are cut.
#[derive(Clone, Copy)]
pub(super) enum Cut {
    /// Into chunks of one size.
    Chunks(Divisor),
    /// Where shares of the batch end.
    Shares {
        shares: Shares,
        /// Of units, the keys.
        unit: u32,
        /// Units of the batch before the keys of the tile.
        before: u64,
        /// Shares of which pieces were cut.
        begun: u64,
    },
}

/// Shares are worth their irregular pieces where chunks take this much longer, in tenths.
const WORTH_SHARES: u64 = 11;

impl Cut {
    pub(super) fn of(batch: &HostBatch<'_>, desc: &AttentionDesc, tiling: &Tiling) -> Cut {
        if desc.batch_invariant {
            return Cut::Chunks(Divisor::new(tiling.invariant_chunk));
        }
        let chunk = Divisor::new(smallest_chunk(batch, tiling));
        match worthwhile_shares(batch, tiling, chunk) {
            Some(shares) => Cut::Shares {
                shares,
                unit: tiling.kv_unit,
                before: shares.keys_of_tile(0),
                begun: 0,
            },
            None => Cut::Chunks(chunk),
        }
    }

    /// End of the piece of a tile of `keys` that begins at key `start`.
    pub(super) fn end(&self, start: u32, keys: &Range<u32>) -> u32 {
        let piece = match self {
            Cut::Chunks(chunk) => chunk.divisor,
            Cut::Shares {
                shares,
                unit,
                before,
                ..
            } => {
                let units = (keys.end - keys.start).div_ceil(*unit);
                let done = (start - keys.start) / unit;
                shares.next(*before, done, units).saturating_mul(*unit)
            }
        };
        start.saturating_add(piece).min(keys.end)
    }

    /// Whether a share begins with the piece that begins at key `start` of a tile of `keys`.
    pub(super) fn begins_share(&mut self, start: u32, keys: &Range<u32>) -> bool {
        let Cut::Shares {
            shares,
            unit,
            before,
            begun,
        } = self
        else {
            return false;
        };
        let share = shares.of_piece(*before + u64::from((start - keys.start) / *unit));
        let begins = share >= *begun;
        *begun = share + 1;
        begins
    }

    /// Goes to the next tile; the request of this one has so many keys.
    pub(super) fn pass(&mut self, keys: u32) {
        if let Cut::Shares {
            shares,
            unit,
            before,
            ..
        } = self
        {
            *before = shares.keys_of_tile(*before + u64::from(keys.div_ceil(*unit)));
        }
    }
}

/// Equal shares, where chunks of one size take much longer.
fn worthwhile_shares(batch: &HostBatch<'_>, tiling: &Tiling, chunk: Divisor) -> Option<Shares> {
    // After so many rounds a last one that is not full costs less than a tenth.
    const ROUNDS: usize = 10;
    let most = tiling.max_shares as usize;
    if most <= 1 || batch.batch_size() / most >= ROUNDS {
        return None;
    }
    let shares = Shares::of(batch, tiling);
    let cost = shares.cost() + u64::from(tiling.combine_units);
    let pay = WORTH_SHARES * cost < 10 * cost_of_chunks(batch, tiling, chunk);
    pay.then_some(shares)
}

/// Units of keys in the time of chunks: items of mean length are dealt out in rounds, none ends before the longest item,
/// and rows that are split are combined.
fn cost_of_chunks(batch: &HostBatch<'_>, tiling: &Tiling, chunk: Divisor) -> u64 {
    let (mut items, mut units, mut longest, mut whole) = (0u64, 0u64, 0, true);
    for b in (0..batch.batch_size()).filter(|&b| batch.planned_rows(b) > 0) {
        let keys = batch.num_keys_in_window(b, tiling.kv_unit);
        let tiles = u64::from(batch.planned_rows(b).div_ceil(tiling.q_tile));
        items += tiles * u64::from(chunk.divide_up(keys).max(1));
        units += tiles * u64::from(keys.div_ceil(tiling.kv_unit));
        longest = longest.max(keys.min(chunk.divisor));
        whole &= keys <= chunk.divisor;
    }
    let most = u64::from(tiling.max_shares);
    let of_tile = u64::from(units_of_tile(tiling));
    let units = units + items * of_tile;
    let longest = u64::from(longest.div_ceil(tiling.kv_unit)) + of_tile;
    let rounds = items.div_ceil(most);
    let in_rounds = rounds.saturating_mul(units) / items.max(1);
    let units = match tiling.takes_shares {
        // Items are dealt out before it is known how long they take: who has the longest has one of each round.
        true => longest.saturating_add(in_rounds - in_rounds / rounds.max(1)),
        false => in_rounds.max(longest),
    };
    let combine = if whole { 0 } else { tiling.combine_units };
    units.saturating_add(u64::from(combine))
}
