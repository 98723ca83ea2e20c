//! Cuts a batch into equal shares of keys: where the items of a batch are few and long, chunks of one size leave some
//! workers idle while others take a second item (150 requests of one length on 132 workers: nearly half of the time).
//! A share ends where it is full, whatever request that is in, so a request is cut at most once more than there are
//! shares in it. Which cut is made, this or chunks of one size, is `schedule`'s choice.

use crate::problem::{HostBatch, Tiling};

/// A piece of fewer units is not worth an item: it goes to the share before, or the next share begins there.
const FEWEST_UNITS: u32 = 3;

/// Hands out the pieces of tiles, in the order of the batch.
#[derive(Debug, Clone, Copy)]
pub struct Shares {
    /// Units of keys.
    share: u32,
    room: u32,
    /// Shares that were begun.
    begun: u32,
    splits_left: u32,
}

impl Shares {
    /// The smallest shares from the fair one on of which there are no more than `Tiling::max_shares`, or nearly so: pieces
    /// that are too small leave gaps.
    pub fn of(batch: &HostBatch<'_>, tiling: &Tiling, fair: u64) -> Shares {
        let most = tiling.max_shares.max(1);
        let mut share = u32::try_from(fair).unwrap_or(u32::MAX).max(FEWEST_UNITS);
        loop {
            let shares = Shares {
                share,
                room: share,
                begun: 1,
                splits_left: tiling.max_shares,
            };
            if share == u32::MAX || shares.needed(batch, tiling) <= most {
                return shares;
            }
            share = share.saturating_add(share.div_ceil(32));
        }
    }

    /// Shares that the batch needs.
    fn needed(mut self, batch: &HostBatch<'_>, tiling: &Tiling) -> u32 {
        for units in tiles(batch, tiling) {
            let mut left = units;
            while left > 0 {
                left -= self.next(left);
            }
        }
        self.begun
    }

    /// What the largest share takes, in units, and a little for the pieces in it.
    pub fn cost(&self) -> u64 {
        u64::from(self.share) + u64::from(FEWEST_UNITS)
    }

    /// Units of the next piece of a tile of which `left` are left.
    pub fn next(&mut self, left: u32) -> u32 {
        if self.room < FEWEST_UNITS && left > self.room {
            self.begin();
        }
        if left <= self.room.saturating_add(FEWEST_UNITS) || self.splits_left == 0 {
            self.room = self.room.saturating_sub(left);
            return left;
        }
        let piece = self.room;
        self.splits_left -= 1;
        self.begin();
        piece
    }

    fn begin(&mut self) {
        self.room = self.share;
        self.begun = self.begun.saturating_add(1);
    }
}

/// Units of keys that each of `Tiling::max_shares` workers has at least, where none is idle.
pub fn fair_share(batch: &HostBatch<'_>, tiling: &Tiling) -> u64 {
    let units: u64 = tiles(batch, tiling).map(u64::from).sum();
    units.div_ceil(u64::from(tiling.max_shares.max(1)))
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
