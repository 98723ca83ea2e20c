//! Where the keys of a batch's tiles are cut: into chunks of one size (`chunk_size`), into chunks of the last tiles only
//! (`tail`), or where equal shares of the batch end (`shares`); and which of them. What comes of it, items and their parts, is
//! `schedule`'s.
//!
//! Chunks are cheap to combine. Shares are for batches of few and long items that chunks would leave unbalanced. A tail is for
//! requests of several tiles: these read the same keys, and shares would have each begin at other ones.

use super::chunk_size::smallest_chunk;
use super::divisor::Divisor;
use super::shares::{Shares, units_of_tile};
use super::tail::{Tail, worthwhile_tail};
use super::tile::Tile;
use crate::error::Result;
use crate::problem::{AttentionDesc, FreeWorkers, HostBatch, Tiling};

/// Where the keys of a tile are cut.
#[derive(Clone, Copy)]
pub(super) enum Cut {
    /// Into chunks of one size.
    Chunks(Divisor),
    /// Into chunks of the last tiles. How many whole ones are left to come counts down.
    Tail(Tail),
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
    /// The quickest, by estimates. `free` is scratch.
    ///
    /// # Errors
    /// `OutOfMemory` where `free` cannot grow.
    pub(super) fn of(
        batch: &HostBatch<'_>,
        desc: &AttentionDesc,
        tiling: &Tiling,
        free: &mut Vec<FreeWorkers>,
    ) -> Result<Cut> {
        if desc.batch_invariant {
            return Ok(Cut::Chunks(Divisor::new(tiling.invariant_chunk)));
        }
        let chunk = Divisor::new(smallest_chunk(batch, tiling));
        let shares = match tiles_share_keys(batch, tiling) {
            true => None,
            false => worthwhile_shares(batch, desc, tiling, chunk),
        };
        if let Some(shares) = shares {
            return Ok(Cut::Shares {
                shares,
                unit: tiling.kv_unit,
                before: shares.keys_of_tile(0),
                begun: 0,
            });
        }
        let tail = worthwhile_tail(batch, desc, tiling, chunk.divisor, free)?;
        Ok(tail.map_or(Cut::Chunks(chunk), Cut::Tail))
    }

    /// End of the piece of a tile that begins at key `start`.
    pub(super) fn end(&self, start: u32, tile: &Tile) -> u32 {
        let keys = &tile.keys;
        let piece = match self {
            Cut::Chunks(chunk) => chunk.divisor,
            Cut::Tail(tail) if tail.whole > 0 => u32::MAX,
            // Keys that a causal mask hides are with the last that it leaves.
            Cut::Tail(tail) if tile.seen(&(start..keys.end)) <= tail.chunk => u32::MAX,
            Cut::Tail(tail) => tail.chunk,
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

    /// Whether a share begins with the piece that begins at key `start` of a tile.
    pub(super) fn begins_share(&mut self, start: u32, tile: &Tile) -> bool {
        let Cut::Shares {
            shares,
            unit,
            before,
            begun,
        } = self
        else {
            return false;
        };
        let share = shares.of_piece(*before + u64::from((start - tile.keys.start) / *unit));
        let begins = share >= *begun;
        *begun = share + 1;
        begins
    }

    /// Goes to the tile behind this one.
    pub(super) fn pass(&mut self, tile: &Tile) {
        match self {
            Cut::Chunks(_) => {}
            Cut::Tail(tail) => tail.whole = tail.whole.saturating_sub(1),
            Cut::Shares {
                shares,
                unit,
                before,
                ..
            } => {
                let units = u64::from(tile.keys_of_request.div_ceil(*unit));
                *before = shares.keys_of_tile(*before + units);
            }
        }
    }
}

/// Whether a request has several tiles that find in the L2 what another one reads.
pub(super) fn tiles_share_keys(batch: &HostBatch<'_>, tiling: &Tiling) -> bool {
    let is_long = |b| !tiling.may_be_shared(batch.planned_rows(b));
    !tiling.may_be_shared(u32::MAX) && (0..batch.batch_size()).any(is_long)
}

/// Equal shares, where chunks of one size take much longer.
fn worthwhile_shares(
    batch: &HostBatch<'_>,
    desc: &AttentionDesc,
    tiling: &Tiling,
    chunk: Divisor,
) -> Option<Shares> {
    // After so many rounds a last one that is not full costs less than a tenth.
    const ROUNDS: usize = 10;
    let most = tiling.max_shares as usize;
    if most <= 1 || batch.batch_size() / most >= ROUNDS {
        return None;
    }
    let shares = Shares::of(batch, tiling);
    let of_memory = units_of_memory(batch, desc, tiling);
    let cost = shares.cost().max(of_memory) + u64::from(tiling.combine_units);
    let pay = WORTH_SHARES * cost < 10 * cost_of_chunks(batch, tiling, chunk, of_memory);
    pay.then_some(shares)
}

/// What no cut is below: each worker's keys come from memory. (27 requests of 16 tokens on 31,000 keys with 28/4 heads, whole
/// on 108 of the 132 multiprocessors of an H100: 606 µs. In equal shares for all of them: 688.)
fn units_of_memory(batch: &HostBatch<'_>, desc: &AttentionDesc, tiling: &Tiling) -> u64 {
    if tiling.unit_bytes == u32::MAX {
        return 0;
    }
    let keys = (0..batch.batch_size())
        .filter(|&b| batch.planned_rows(b) > 0)
        .map(|b| u64::from(batch.num_keys_in_window(b, tiling.kv_unit)))
        .sum::<u64>();
    let of_head = [desc.head_dim_qk, desc.head_dim_vo].map(|dim| desc.kv_format.row_bytes(dim));
    let of_key = u64::from(desc.num_kv_heads) * of_head.iter().sum::<usize>() as u64;
    keys.saturating_mul(of_key) / u64::from(tiling.unit_bytes)
}

/// Units of keys in the time of chunks: items of mean length are dealt out in rounds, none ends before the longest item,
/// and rows that are split are combined.
fn cost_of_chunks(batch: &HostBatch<'_>, tiling: &Tiling, chunk: Divisor, of_memory: u64) -> u64 {
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
    units.max(of_memory).saturating_add(u64::from(combine))
}
