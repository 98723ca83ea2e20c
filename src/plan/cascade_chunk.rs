//! The size of the chunks that the segments of a cascade are cut into, one for all of them, and which items are small: what is
//! estimated to take the least time. What segments are, and their items, is `cascade`'s.
//!
//! Time is counted in keys that one worker reads. No run is faster than its keys divided by its workers. Nor is it
//! faster than whole chunks dealt out in rounds: items of shared keys are few and long, so that one more of them than
//! there are workers takes twice as long. Shorter items fill what longer ones leave. Small items, several pieces of which a
//! worker may take at a time, come last. And every part of a row is written
//! and read, in the time of as many bytes of keys.
//!
//! A worker chooses its next piece when it begins one. So those that begin the run with a long piece have a small one behind it:
//! one of the longest, if these are not all begun at once with the others.

use super::capacity::most_splits;
use super::reserve::reserve;
use crate::error::Result;
use crate::problem::{AttentionDesc, SmallItems, Tiling};

/// What the first keys of an item take longer than further ones, in units of `kv_unit` keys. Loads of the next item hide it
/// from all but the items of a round that wait for one another.
const ITEM_UNITS: u64 = 2;

/// A key of small pieces that a worker takes side by side costs so many of others: those of several heads are loaded. With
/// this number the cuts that were the fastest of some twenty on an H200 are chosen, or those within 2 % of them. (By a fit to
/// their times it is 2.4: 3.2 µs for 80 keys of three heads, of which 2.7 to 4 are the bytes of 132 workers at 4.2 TB/s, and
/// 1.35 for 80 of 192 rows.)
const SMALL_KEY: u64 = 2;

/// Where all pieces are small, shorter ones than so many units save nothing: of 16 requests of 2k shared keys and 128 of their
/// own, pieces of 560, 400, 320, 240 and 160 keys took 21.8, 19.2, 18.8, 19.2 and 19.3 µs on an H200.
const LEAST_UNITS: u32 = 4;

/// Chunks that the longest segment is cut into at most, unless more are needed for all workers.
const MOST_CHUNKS: u32 = 32;

/// What of a segment decides about its time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub rows: u32,
    pub keys: u32,
    /// Whether its rows have other parts too.
    pub is_part: bool,
}

/// Segments that some candidate cuts; the others cost the same in all of them.
#[derive(Debug, Default)]
pub struct LongSegments(Vec<Extent>);

/// How all segments are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cuts {
    /// Keys of a chunk, a multiple of `kv_unit`, or more than any segment has.
    pub chunk: u32,
    /// The items of which a worker takes several pieces at a time.
    pub small: SmallItems,
}

/// The best cuts.
pub(super) fn best_cuts(
    segments: impl Iterator<Item = Extent> + Clone,
    desc: &AttentionDesc,
    tiling: &Tiling,
    LongSegments(long): &mut LongSegments,
) -> Result<Cuts> {
    let small = small_items(segments.clone(), tiling);
    let longest = segments.clone().map(|s| s.keys).max().unwrap_or(0);
    let most_chunks = MOST_CHUNKS.max(tiling.workers.all / tiling.workers.of_item);
    let shortest = chunk_of(longest, most_chunks, tiling);
    long.clear();
    reserve(
        "segments",
        long,
        segments.clone().filter(|s| s.keys > shortest).count(),
    )?;
    let mut short = Pieces::default();
    for segment in segments {
        match segment.keys > shortest {
            true => long.push(segment),
            false => short.add(&Pieces::of(&segment, u32::MAX, (tiling, small))),
        }
    }
    let mut best = (u64::MAX, u32::MAX);
    for chunks in 1..=most_chunks {
        let chunk = chunk_of(longest, chunks, tiling);
        let cut = Cut::of(long, chunk, &short, (tiling, small));
        if cut.splits > most_splits(desc, tiling) as u64 {
            break;
        }
        let time = cut.time(chunk, desc, tiling);
        if time < best.0 {
            best = (time, if chunks == 1 { u32::MAX } else { chunk });
        }
    }
    Ok(Cuts {
        chunk: best.1,
        small,
    })
}

/// Items of few rows are taken several pieces at a time whatever their keys, where products take longer than memory: that
/// spares workers (128 requests of 32k shared keys, eight documents of 4k and 256 keys, on an H200: 180 µs instead of 194).
/// Where memory limits it is slower (64 requests of 2k keys: 151 instead of 145).
fn small_items(segments: impl Iterator<Item = Extent>, tiling: &Tiling) -> SmallItems {
    let small = tiling.workers.small;
    let (mut products, mut memory) = (0u64, 0u64);
    for segment in segments {
        let keys = u64::from(segment.keys);
        match segment.rows > small.rows {
            true => products += u64::from(segment.rows.div_ceil(tiling.q_tile)) * keys,
            false => memory += keys,
        }
    }
    match small.rows > 0 && products > memory {
        true => SmallItems {
            keys: u32::MAX,
            ..small
        },
        false => small,
    }
}

/// Keys of a chunk where the longest segment has so many.
fn chunk_of(longest: u32, chunks: u32, tiling: &Tiling) -> u32 {
    let units = longest.div_ceil(tiling.kv_unit).div_ceil(chunks).max(1);
    units.saturating_mul(tiling.kv_unit)
}

/// What workers take, one at a time.
#[derive(Debug, Clone, Copy, Default)]
struct Pieces {
    count: u64,
    /// Keys of all of them, small ones at their price.
    keys: u64,
    /// Those of whole chunks, or nearly so, that are not small.
    whole: u64,
    small: u64,
    /// Keys of the small ones, at their price; of the longest; and how many are at least half as long.
    small_keys: u64,
    longest_small: u64,
    long_small: u64,
}

impl Pieces {
    fn of(segment: &Extent, chunk: u32, (tiling, small): (&Tiling, SmallItems)) -> Pieces {
        let is_small = small.include(segment.rows, segment.keys.min(chunk));
        let (of_item, price) = match is_small {
            true => (small.of_item, SMALL_KEY),
            false => (tiling.workers.of_item, 1),
        };
        let (keys, chunk) = (u64::from(segment.keys), u64::from(chunk));
        let tiles = u64::from(segment.rows.div_ceil(tiling.q_tile)) * u64::from(of_item);
        let count = tiles * keys.div_ceil(chunk).max(1);
        let all = (tiles * price).saturating_mul(keys);
        let pieces = Pieces {
            count,
            keys: all,
            ..Pieces::default()
        };
        match is_small {
            true => Pieces {
                small: count,
                small_keys: all,
                longest_small: price * keys.min(chunk),
                long_small: count,
                ..pieces
            },
            false => Pieces {
                whole: tiles * ((2 * keys + chunk) / (2 * chunk)),
                ..pieces
            },
        }
    }

    fn add(&mut self, more: &Pieces) {
        self.count += more.count;
        self.keys = self.keys.saturating_add(more.keys);
        self.whole += more.whole;
        self.small += more.small;
        self.small_keys = self.small_keys.saturating_add(more.small_keys);
        if 2 * self.longest_small < more.longest_small {
            self.long_small = 0;
        }
        if 2 * more.longest_small >= self.longest_small {
            self.long_small += more.long_small;
        }
        self.longest_small = self.longest_small.max(more.longest_small);
    }
}

/// What a size of chunks makes of the segments.
#[derive(Debug)]
struct Cut {
    pieces: Pieces,
    /// Items more than there are tiles.
    splits: u64,
    /// Partial rows more than there are with no split.
    parts: u64,
}

impl Cut {
    fn of(long: &[Extent], chunk: u32, short: &Pieces, how: (&Tiling, SmallItems)) -> Cut {
        let mut cut = Cut {
            pieces: *short,
            splits: 0,
            parts: 0,
        };
        for segment in long {
            cut.pieces.add(&Pieces::of(segment, chunk, how));
            let more = u64::from(segment.keys.div_ceil(chunk).max(1) - 1);
            cut.splits += u64::from(segment.rows.div_ceil(how.0.q_tile)) * more;
            let first = u64::from(!segment.is_part && more > 0);
            cut.parts += u64::from(segment.rows) * (more + first);
        }
        cut
    }

    /// In keys of a worker, times the number of workers.
    fn time(&self, chunk: u32, desc: &AttentionDesc, tiling: &Tiling) -> u64 {
        let workers = u64::from(tiling.workers.all);
        let item = ITEM_UNITS * u64::from(tiling.kv_unit);
        let longest = workers.saturating_mul(self.longest(chunk, tiling));
        let keys = self.pieces.keys.max(longest);
        let items = self
            .pieces
            .count
            .next_multiple_of(workers)
            .saturating_mul(item);
        let part = 2 * u64::from(desc.num_qo_heads) * u64::from(desc.head_dim_vo) * 4;
        let parts = (self.parts * part).div_ceil(desc.kv_bytes().max(1));
        keys.saturating_add(items).saturating_add(parts)
    }

    /// What no worker with the longest pieces is faster than. Where all are small, shorter ones than some steps save nothing.
    fn longest(&self, chunk: u32, tiling: &Tiling) -> u64 {
        let (pieces, workers) = (&self.pieces, u64::from(tiling.workers.all));
        if pieces.whole == 0 {
            let least = SMALL_KEY * u64::from(LEAST_UNITS * tiling.kv_unit);
            return pieces.longest_small.max(least);
        }
        let behind = match pieces.whole % workers + pieces.long_small > workers {
            true => pieces.longest_small,
            false => pieces.small_keys / pieces.small.max(1),
        };
        let rounds = pieces.whole.div_ceil(workers);
        rounds
            .saturating_mul(u64::from(chunk))
            .saturating_add(behind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{Kind, KvLayout, KvStorage, SmallItems, Workers};

    /// The Hopper prefill kernel on 132 multiprocessors, 32 heads over 8 of 128 elements.
    const TILING: Tiling = Tiling {
        q_tile: 48,
        kv_unit: 80,
        max_splits: 12,
        max_shares: 0,
        takes_shares: false,
        least_gain: 0,
        invariant_chunk: u32::MAX,
        combine_units: 8,
        own_key_bytes: 0,
        workers: Workers {
            all: 132,
            of_item: 8,
            small: SmallItems::NONE,
        },
    };

    fn desc() -> AttentionDesc {
        AttentionDesc {
            kind: Kind::Prefill,
            q_dtype: DType::BF16,
            kv_format: DType::BF16.into(),
            o_dtype: DType::BF16,
            num_qo_heads: 32,
            num_kv_heads: 8,
            head_dim_qk: 128,
            head_dim_vo: 128,
            kv: KvStorage::Paged {
                page_size: 16,
                layout: KvLayout::Nhd,
            },
            max_batch_size: 1 << 10,
            max_qo_len: 1,
            max_num_tokens: 1 << 10,
            max_kv_len: 1 << 20,
            max_num_pages: 1 << 20,
            graph: false,
            batch_invariant: false,
            fp8_products: false,
            mask_items: false,
            shared_levels: 2,
            new_kv: None,
        }
    }

    fn cuts(segments: impl Iterator<Item = Extent> + Clone, tiling: &Tiling) -> Cuts {
        best_cuts(segments, &desc(), tiling, &mut LongSegments::default()).unwrap()
    }

    fn chunk(shared: &[(u32, u32)], own: (u32, u32)) -> u32 {
        let part = |rows, keys| Extent {
            rows,
            keys,
            is_part: true,
        };
        let shared = shared.iter().map(|&(rows, keys)| part(rows, keys));
        let own = (0..own.0).map(|_| part(1, own.1));
        cuts(shared.chain(own), &TILING).chunk
    }

    /// The longest item takes no longer than all of them by 132 multiprocessors.
    #[test]
    fn long_prefixes_are_cut_until_items_fill_the_device() {
        for (shared, own) in [
            (vec![(256, 32720)], (256, 304)),
            (
                vec![(128, 32720), (16, 4080), (16, 4080), (16, 4080)],
                (128, 304),
            ),
            (vec![(256, 8160)], (256, 288)),
            (vec![(64, 8160)], (64, 288)),
        ] {
            let tiles = |rows: u32| u64::from(rows.div_ceil(48));
            let longest = shared[0].1;
            let chunk = chunk(&shared, own).min(longest);
            assert!(chunk % 80 == 0, "{chunk}");
            let (mut keys, mut whole) = (u64::from(own.0 * own.1), 0);
            for (rows, segment) in shared {
                keys += tiles(rows) * u64::from(segment);
                whole += tiles(rows) * u64::from(segment / chunk);
            }
            let all = keys * 8 / 132;
            let rounds = (whole * 8).div_ceil(132) * u64::from(chunk);
            assert!(rounds <= all + all / 8, "{chunk}: {rounds} against {all}");
        }
    }

    /// 8 items of own keys and 7 of shared ones are 120 tiles for 132 multiprocessors.
    #[test]
    fn short_prefixes_are_not_cut_into_more_than_runs_at_a_time() {
        let chunk = chunk(&[(8, 1040)], (8, 112));
        assert!(1040u32.div_ceil(chunk) + 8 <= 16, "{chunk}");
    }

    /// The same kernel over pages: it takes three heads of a few rows at a time.
    const SIDE_BY_SIDE: Tiling = Tiling {
        workers: Workers {
            small: SmallItems {
                rows: 16,
                keys: 640,
                of_item: 3,
            },
            ..TILING.workers
        },
        ..TILING
    };

    fn parts(count: usize, rows: u32, keys: u32) -> Vec<Extent> {
        let part = Extent {
            rows,
            keys,
            is_part: true,
        };
        vec![part; count]
    }

    /// Small pieces of shared keys are as short as lets all run at a time, whatever it adds to their number.
    #[test]
    fn no_small_piece_takes_longer_than_others_wait() {
        let segments = [parts(1, 16, 2000), parts(16, 1, 176)].concat();
        let cuts = cuts(segments.into_iter(), &SIDE_BY_SIDE);
        assert!(cuts.chunk <= 400, "{cuts:?}");
    }

    /// The cuts that were the fastest of those that were set by hand on an H200 (6 of 64 x 8k; 7 was not tried).
    #[test]
    fn the_fastest_cuts_are_chosen() {
        for (shared, own, chunks) in [
            (parts(1, 256, 8160), 288, 2..=2),
            (parts(1, 256, 32720), 304, 5..=5),
            (parts(1, 64, 8160), 288, 6..=7),
            (
                [parts(1, 128, 32720), parts(8, 16, 4080)].concat(),
                304,
                4..=4,
            ),
        ] {
            let Extent { rows, keys, .. } = shared[0];
            let all = [shared, parts(rows as usize, 1, own)].concat();
            let cuts = cuts(all.into_iter(), &SIDE_BY_SIDE);
            assert!(chunks.contains(&keys.div_ceil(cuts.chunk)), "{cuts:?}");
        }
    }

    /// Documents of few rows go to a worker three heads at a time where shared keys take longer than memory.
    #[test]
    fn few_rows_are_side_by_side_while_others_multiply() {
        for (shared, keys, is_long) in [(128, 32720, true), (32, 2000, false)] {
            let documents = [parts(1, shared, keys), parts(8, 16, 4080)].concat();
            let cuts = cuts(documents.into_iter(), &SIDE_BY_SIDE);
            assert_eq!(cuts.small.include(16, 4080), is_long, "{shared}");
            assert!(!cuts.small.include(17, 80));
        }
    }

    #[test]
    fn what_fills_the_device_is_not_cut() {
        assert_eq!(chunk(&[], (512, 300)), u32::MAX);
        assert_eq!(chunk(&[(48 * 33, 4000)], (0, 0)), u32::MAX);
    }
}
