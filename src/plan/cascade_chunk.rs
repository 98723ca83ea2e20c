//! The size of the chunks that the segments of a cascade are cut into, one for all of them, and which items are small: what is
//! estimated to take the least time. What segments are, and their items, is `cascade`'s.
//!
//! Time is counted in keys that one worker reads. Workers take pieces in the order of the plan, whoever is free the next one:
//! the long ones first, and small items, several pieces of which a worker may take at a time, behind the others. How long that
//! takes is found by dealing the pieces out, those of about the same length at once. And every part of a row is written and
//! read, in the time of as many bytes of keys.

use super::capacity::most_splits;
use super::dealing::Dealing;
use super::reserve::reserve;
use crate::error::Result;
use crate::problem::{AttentionDesc, FreeWorkers, SmallItems, Tiling};

/// What a piece takes beside its keys, in units of `kv_unit` keys.
const PIECE_UNITS: u64 = 2;

/// Two keys of small pieces that a worker takes side by side cost so many of others: those of several heads are loaded.
const SMALL_KEYS: u64 = 3;

/// Parts of rows are written and read, and each costs this many times as much as that.
///
/// With these numbers, which are rounded ones of a fit to 28 cuts of four batches on an H200, the fastest of the cuts of each
/// batch is chosen; the fit is within 5 % of their times.
const PART: u64 = 2;

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

/// Segments that some candidate cuts, the others cost the same in all of them; and when workers are free.
#[derive(Debug, Default)]
pub struct LongSegments(Vec<Extent>, Vec<FreeWorkers>);

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
    LongSegments(long, free): &mut LongSegments,
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
    let mut workers = Dealing::new(free, tiling.workers.all)?;
    let mut short = Pieces::default();
    for segment in segments {
        match segment.keys > shortest {
            true => long.push(segment),
            false => short.add(&segment, u32::MAX, (tiling, small)),
        }
    }
    let mut best = (u64::MAX, u32::MAX);
    for chunks in 1..=most_chunks {
        let chunk = chunk_of(longest, chunks, tiling);
        let cut = Cut::of(long, chunk, &short, (tiling, small));
        if cut.splits > most_splits(desc, tiling) as u64 {
            break;
        }
        let time = cut.time(&mut workers, desc, tiling);
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

/// Pieces of about the same length.
#[derive(Debug, Clone, Copy, Default)]
struct Class {
    count: u64,
    /// Of all of them.
    keys: u64,
}

/// Lengths whose binary logarithms are the same, rounded down, are one class.
const CLASSES: usize = u32::BITS as usize;

/// What workers take, one at a time: pieces that are not small, then small ones.
#[derive(Debug, Clone, Copy, Default)]
struct Pieces {
    large: [Class; CLASSES],
    small: [Class; CLASSES],
}

impl Pieces {
    /// Adds the pieces of a segment.
    fn add(&mut self, segment: &Extent, chunk: u32, (tiling, small): (&Tiling, SmallItems)) {
        let is_small = small.include(segment.rows, segment.keys.min(chunk));
        let (classes, of_item) = match is_small {
            true => (&mut self.small, small.of_item),
            false => (&mut self.large, tiling.workers.of_item),
        };
        let tiles = u64::from(segment.rows.div_ceil(tiling.q_tile)) * u64::from(of_item);
        let (whole, rest) = (segment.keys / chunk, segment.keys % chunk);
        let has_rest = rest > 0 || whole == 0;
        for (keys, count) in [(chunk, whole), (rest, u32::from(has_rest))] {
            let class = &mut classes[keys.checked_ilog2().unwrap_or(0) as usize];
            let count = u64::from(count) * tiles;
            class.count += count;
            class.keys = class.keys.saturating_add(count * u64::from(keys));
        }
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
            cut.pieces.add(segment, chunk, how);
            let more = u64::from(segment.keys.div_ceil(chunk).max(1) - 1);
            cut.splits += u64::from(segment.rows.div_ceil(how.0.q_tile)) * more;
            let first = u64::from(!segment.is_part && more > 0);
            cut.parts += u64::from(segment.rows) * (more + first);
        }
        cut
    }

    /// In keys of a worker, times the number of workers.
    fn time(&self, workers: &mut Dealing<'_>, desc: &AttentionDesc, tiling: &Tiling) -> u64 {
        let all = tiling.workers.all;
        let beside = PIECE_UNITS * u64::from(tiling.kv_unit);
        workers.all_free();
        // The mean of a class.
        let each = |class: &Class, keys: u64| keys / class.count + beside;
        let present = |class: &&Class| class.count > 0;
        for class in self.pieces.large.iter().rev().filter(present) {
            workers.deal(class.count, each(class, class.keys));
        }
        for class in self.pieces.small.iter().rev().filter(present) {
            workers.deal(
                class.count,
                each(class, class.keys.saturating_mul(SMALL_KEYS) / 2),
            );
        }
        let part = 2 * u64::from(desc.num_qo_heads) * u64::from(desc.head_dim_vo) * 4;
        let parts = (PART * self.parts * part).div_ceil(desc.kv_bytes().max(1));
        let last = workers.last().max(self.least(tiling));
        last.saturating_mul(u64::from(all)).saturating_add(parts)
    }

    /// Where all are small, shorter ones than some steps save nothing.
    fn least(&self, tiling: &Tiling) -> u64 {
        match self.pieces.large.iter().any(|class| class.count > 0) {
            true => 0,
            false => {
                let keys = u64::from(LEAST_UNITS) * u64::from(tiling.kv_unit) * SMALL_KEYS / 2;
                keys + PIECE_UNITS * u64::from(tiling.kv_unit)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{self, Kind, KvLayout, KvStorage, SmallItems, TailCosts};

    /// The Hopper prefill kernel on 132 multiprocessors, 32 heads over 8 of 128 elements.
    const TILING: Tiling = Tiling {
        q_tile: 48,
        q_parts: 1,
        kv_unit: 80,
        unit_bytes: u32::MAX,
        max_splits: 12,
        max_shares: 0,
        tail: TailCosts::NO_TAIL,
        takes_shares: false,
        least_gain: 0,
        rows_of_unit: 0,
        invariant_chunk: u32::MAX,
        combine_units: 8,
        own_key_bytes: 0,
        workers: problem::Workers {
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
        workers: problem::Workers {
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

    /// The cuts that were the fastest of those that were set by hand on an H200 (6 of 64 x 8k take as long, and 8
    /// of 96 x 32k nearly).
    #[test]
    fn the_fastest_cuts_are_chosen() {
        for (shared, own, chunks) in [
            (parts(1, 256, 8160), 288, 2..=2),
            (parts(1, 256, 32720), 304, 5..=5),
            (parts(1, 64, 8160), 288, 4..=6),
            (parts(1, 128, 8160), 288, 3..=3),
            (parts(1, 160, 16320), 320, 3..=3),
            (parts(1, 96, 32720), 176, 7..=8),
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
