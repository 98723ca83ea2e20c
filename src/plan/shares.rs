//! Cuts a batch into equal shares of keys: where the items of a batch are few and long, chunks of one size leave some
//! workers idle while others take a second item (150 requests of one length on 132 workers: nearly half of the time).
//! The tiles lie one behind the other, and every multiple of the share is a cut, whatever tile that is in. So a batch is
//! cut at most once less than it has shares. Which cut is made, this or chunks of one size, is `schedule`'s choice.
//!
//! `kernels/plan/plan.cu` cuts by the same rule.

use crate::problem::{HostBatch, Tiling};

/// A piece of fewer units is not worth an item: a cut so near to the begin or the end of a tile is not made.
const FEWEST_UNITS: u32 = 3;

/// Where a batch is cut.
#[derive(Debug, Clone, Copy)]
pub struct Shares {
    /// Units of `Tiling::kv_unit` keys, no fewer than [`FEWEST_UNITS`].
    share: u32,
}

impl Shares {
    /// As many as `Tiling::max_shares`, so that none of as many workers is idle.
    pub fn of(batch: &HostBatch<'_>, tiling: &Tiling) -> Shares {
        let units: u64 = tiles(batch, tiling).map(u64::from).sum();
        let share = units.div_ceil(u64::from(tiling.max_shares.max(1)));
        Shares {
            share: u32::try_from(share).unwrap_or(u32::MAX).max(FEWEST_UNITS),
        }
    }

    /// What the largest share takes, in units, and a little for the pieces in it.
    pub fn cost(self) -> u64 {
        u64::from(self.share) + u64::from(FEWEST_UNITS)
    }

    /// The share of a piece that begins behind so many units of the batch: where a cut is not made, pieces are as much
    /// longer or shorter.
    pub fn of_piece(self, begin: u64) -> u64 {
        (begin + u64::from(FEWEST_UNITS) - 1) / u64::from(self.share)
    }

    /// Units of the next piece of a tile of `units`, of which `done` are in pieces. `before` units of the batch are before
    /// the tile.
    pub fn next(self, before: u64, done: u32, units: u32) -> u32 {
        let begin = before + u64::from(done);
        let cut = (begin + u64::from(FEWEST_UNITS)).next_multiple_of(u64::from(self.share));
        match cut + u64::from(FEWEST_UNITS) <= before + u64::from(units) {
            true => (cut - begin) as u32,
            false => units - done,
        }
    }
}

/// The keys of every tile of a batch, in units of `Tiling::kv_unit`.
fn tiles(batch: &HostBatch<'_>, tiling: &Tiling) -> impl Iterator<Item = u32> {
    (0..batch.batch_size()).flat_map(|b| {
        let tiles = batch.qo_len(b).div_ceil(tiling.q_tile) as usize;
        std::iter::repeat_n(
            batch
                .num_keys_in_window(b, tiling.kv_unit)
                .div_ceil(tiling.kv_unit),
            tiles,
        )
    })
}
