//! Cuts a batch into equal shares of keys: where the items of a batch are few and long, chunks of one size leave some
//! workers idle while others take a second item (150 requests of one length on 132 workers: nearly half of the time).
//! The tiles lie one behind the other, and every multiple of the share is a cut, whatever tile that is in. So a batch is
//! cut at most once less than it has shares. Which cut is made, this or chunks of one size, is `cut`'s choice.
//!
//! `kernels/plan/plan.cu` cuts by the same rule.

use crate::problem::{HostBatch, Tiling};

/// A piece of fewer keys is not worth an item: a cut so near to the begin or the end of a tile is not made.
const FEWEST_KEYS: u32 = 192;

/// Keys that a worker that takes shares could compute in the time that it needs for a tile beside its keys: 5 µs on an H200.
const KEYS_OF_TILE: u32 = 192;

/// Where a batch is cut.
#[derive(Debug, Clone, Copy)]
pub struct Shares {
    /// Units of `Tiling::kv_unit` keys, no less than `fewest`.
    share: u32,
    /// Units of the smallest piece.
    fewest: u32,
    /// Units by which a tile is longer than its keys, and which are before them.
    of_tile: u32,
}

impl Shares {
    /// As many as `Tiling::max_shares`, so that none of as many workers is idle.
    pub fn of(batch: &HostBatch<'_>, tiling: &Tiling) -> Shares {
        let unit = tiling.kv_unit;
        let of_tile = units_of_tile(tiling);
        let of_request = |b: usize| {
            let units = batch.num_keys_in_window(b, unit).div_ceil(unit) + of_tile;
            u64::from(units) * u64::from(batch.planned_rows(b).div_ceil(tiling.q_tile))
        };
        let units: u64 = (0..batch.batch_size()).map(of_request).sum();
        let share = units.div_ceil(u64::from(tiling.max_shares.max(1)));
        let fewest = (FEWEST_KEYS / unit).max(1);
        Shares {
            share: u32::try_from(share).unwrap_or(u32::MAX).max(fewest),
            fewest,
            of_tile,
        }
    }

    /// Where a tile's keys begin, behind so many units of the batch.
    pub fn keys_of_tile(self, before: u64) -> u64 {
        before + u64::from(self.of_tile)
    }

    /// What the largest share takes, in units, and a little for the pieces in it.
    pub fn cost(self) -> u64 {
        u64::from(self.share) + u64::from(self.fewest)
    }

    /// The share of a piece whose keys begin behind so many units of the batch: where a cut is not made, pieces are as much
    /// longer or shorter.
    pub fn of_piece(self, begin: u64) -> u64 {
        (begin + u64::from(self.fewest) - 1) / u64::from(self.share)
    }

    /// Units of the next piece of a tile of `units` of keys, of which `done` are in pieces. `before` units of the batch are
    /// before its keys.
    pub fn next(self, before: u64, done: u32, units: u32) -> u32 {
        let begin = before + u64::from(done);
        let cut = (begin + u64::from(self.fewest)).next_multiple_of(u64::from(self.share));
        match cut + u64::from(self.fewest) <= before + u64::from(units) {
            true => (cut - begin) as u32,
            false => units - done,
        }
    }
}

/// Units that a tile counts for beside its keys. Where workers take the largest item that is left, that evens itself out.
pub fn units_of_tile(tiling: &Tiling) -> u32 {
    match tiling.takes_shares {
        true => (KEYS_OF_TILE / tiling.kv_unit).max(1),
        false => 0,
    }
}
