//! The tail of a prefill: its last tiles, whose keys are cut where whole tiles would leave most workers idle at the end. Prompts
//! on long contexts often have a few tiles more than there are workers: 2 × 210 rows on 12,141 keys with 64/8 heads are 144 for
//! the 132 multiprocessors of an H200. They took two rounds and 382 µs, and take 245 with the last 16 in eight chunks each.
//!
//! What is cut is estimated by dealing out the tiles, and the chunks behind them. The other tiles stay whole, and chunks of one
//! place begin at the same key, so that tiles that run at the same time find in the L2 what another one reads.

use super::dealing::Dealing;
use super::tile::{Tile, tiles};
use crate::error::Result;
use crate::problem::{AttentionDesc, FreeWorkers, HostBatch, Tiling};

/// After so many rounds a last one that is not full costs little.
const MOST_ROUNDS: usize = 8;

/// Chunks of a tile that are tried.
const CHUNKS: [u32; 6] = [2, 3, 4, 5, 6, 8];

/// A tail is cut where the batch would take this much longer without, in hundredths. Of 158 random batches that could have one on an
/// H200, this and `TailCosts::least_gain` leave 119: 1.20 times as fast in the mean, and two slower by 6 and 7 %.
const WORTH: u64 = 105;

/// Which tiles are cut, and into what.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tail {
    /// Tiles of the batch before it, which are whole.
    pub whole: usize,
    /// Keys of a chunk.
    pub chunk: u32,
}

/// The tail that spares the most, where one is worth it. Without it, keys are cut into chunks of `chunk`.
///
/// # Errors
/// `OutOfMemory` where `free` cannot grow.
pub(super) fn worthwhile_tail(
    batch: &HostBatch<'_>,
    desc: &AttentionDesc,
    tiling: &Tiling,
    chunk: u32,
    free: &mut Vec<FreeWorkers>,
) -> Result<Option<Tail>> {
    if tiling.tail.most_chunks == 0 {
        return Ok(None);
    }
    let items_of = |rounds| rounds * tiling.workers.all as usize / tiling.workers.of_item as usize;
    let most = items_of(MOST_ROUNDS);
    let count = tiles(batch, tiling).take(most + 1).count();
    if count == 0 || count > most {
        return Ok(None);
    }
    let mut estimate = Estimate {
        desc,
        tiling,
        workers: Dealing::new(free, tiling.workers.all)?,
    };
    let all = Tiles::of(batch, tiling, 0);
    let now = estimate.time(&all, chunk / tiling.kv_unit);
    let pays =
        |least: u64| 100 * now > WORTH * least && now > least + u64::from(tiling.tail.least_gain);
    if !pays(estimate.least(&all)) {
        return Ok(None);
    }
    let (mut best, mut least) = (None, now);
    let rounds = count * tiling.workers.of_item as usize / tiling.workers.all as usize;
    for whole in (rounds.saturating_sub(1)..=rounds).rev().map(items_of) {
        let tiles = Tiles::of(batch, tiling, whole);
        for chunks in CHUNKS {
            let units = tiles.longest().div_ceil(chunks);
            if units == 0 || tiles.chunks(units) > u64::from(tiling.tail.most_chunks) {
                break;
            }
            let time = estimate.time(&tiles, units);
            if time < least {
                let chunk = units.saturating_mul(tiling.kv_unit);
                (best, least) = (Some(Tail { whole, chunk }), time);
            }
        }
    }
    Ok(best.filter(|_| pays(least)))
}

/// Tiles of about the same number of units, of keys that a causal mask leaves.
#[derive(Debug, Clone, Copy, Default)]
struct Class {
    count: u64,
    /// Of all of them.
    units: u64,
    rows: u64,
    /// Of the longest.
    most: u32,
}

impl Class {
    fn add(&mut self, tile: &Tile, units: u32) {
        self.count += 1;
        self.units += u64::from(units);
        self.rows += u64::from(tile.q_len);
        self.most = self.most.max(units);
    }

    /// Units of one.
    fn mean(&self) -> u64 {
        self.units / self.count
    }
}

/// The longest tile is so many classes long.
const CLASSES: usize = 32;

/// The tiles of a batch, the first ones and the tail.
struct Tiles {
    whole: [Class; CLASSES],
    tail: [Class; CLASSES],
}

impl Tiles {
    fn of(batch: &HostBatch<'_>, tiling: &Tiling, whole: usize) -> Tiles {
        let units = |tile: &Tile| tile.seen(&tile.keys).div_ceil(tiling.kv_unit);
        let longest = tiles(batch, tiling).map(|tile| units(&tile)).max();
        let of_class = longest.unwrap_or(0) / CLASSES as u32 + 1;
        let mut all = Tiles {
            whole: Default::default(),
            tail: Default::default(),
        };
        for (at, tile) in tiles(batch, tiling).enumerate() {
            let units = units(&tile);
            let classes = match at < whole {
                true => &mut all.whole,
                false => &mut all.tail,
            };
            classes[(units / of_class) as usize].add(&tile, units);
        }
        all
    }

    /// Units of the longest tile of the tail.
    fn longest(&self) -> u32 {
        present(&self.tail).next().map_or(0, |class| class.most)
    }

    /// Chunks of so many units that the tail is split into, at most.
    fn chunks(&self, units: u32) -> u64 {
        let split = present(&self.tail).filter(|class| class.most > units);
        split
            .map(|class| class.count * u64::from(class.most.div_ceil(units)))
            .sum()
    }
}

/// The classes that have tiles, the longest first.
fn present(classes: &[Class; CLASSES]) -> impl Iterator<Item = &Class> {
    classes.iter().rev().filter(|class| class.count > 0)
}

/// How long a cut takes.
struct Estimate<'a> {
    desc: &'a AttentionDesc,
    tiling: &'a Tiling,
    workers: Dealing<'a>,
}

impl Estimate<'_> {
    /// When the last worker ends and parts are put together, in units, if the tail is cut into chunks of so many.
    fn time(&mut self, tiles: &Tiles, chunk: u32) -> u64 {
        let chunk = u64::from(chunk.max(1));
        self.workers.all_free();
        for class in present(&tiles.whole) {
            self.deal(class.count, class.mean());
        }
        let mut parts = 0;
        for class in present(&tiles.tail) {
            let full = class.mean() / chunk;
            self.deal(class.count * full, chunk);
            if class.mean() > chunk {
                parts += class.rows * class.mean().div_ceil(chunk);
            }
        }
        for class in present(&tiles.tail) {
            let rest = class.mean() % chunk;
            if rest > 0 || class.mean() == 0 {
                self.deal(class.count, rest);
            }
        }
        self.workers.last() + self.combining(parts)
    }

    /// What no tail is below: all workers end together, and parts are put together.
    fn least(&self, tiles: &Tiles) -> u64 {
        let tail = self.tiling.tail;
        let of_class = |class: &Class| class.units + class.count * u64::from(tail.item_units);
        let units: u64 = present(&tiles.tail).map(of_class).sum();
        let workers = self.tiling.workers;
        units * u64::from(workers.of_item) / u64::from(workers.all) + u64::from(tail.combine_units)
    }

    /// So many tiles or chunks of so many units, for all heads.
    fn deal(&mut self, count: u64, units: u64) {
        let pieces = count * u64::from(self.tiling.workers.of_item);
        self.workers
            .deal(pieces, units + u64::from(self.tiling.tail.item_units));
    }

    /// So many rows of partial results are written, and read by a second kernel.
    fn combining(&self, rows: u64) -> u64 {
        if rows == 0 {
            return 0;
        }
        let row = 4 * u64::from(self.desc.num_qo_heads) * u64::from(self.desc.head_dim_vo);
        u64::from(self.tiling.tail.combine_units)
            + 2 * rows * row / u64::from(self.tiling.unit_bytes)
    }
}
