//! The size of the chunks that the segments of a cascade are cut into: one for all of them, the one whose estimated time
//! is the least. What segments are, and their items, is `cascade`'s.
//!
//! Time is counted in keys that one worker reads. No run is faster than its keys divided by its workers. Nor is it
//! faster than whole chunks dealt out in rounds: items of shared keys are few and long, so that one more of them than
//! there are workers takes twice as long. Shorter items fill what longer ones leave. Small items, several pieces of which a
//! worker may take at a time, come last. And every part of a row is written
//! and read, in the time of as many bytes of keys.

use super::capacity::most_splits;
use super::reserve::reserve;
use crate::error::Result;
use crate::problem::{AttentionDesc, Tiling};

/// What the first keys of an item take longer than further ones, in units of `kv_unit` keys. Loads of the next item hide it
/// from all but the items of a round that wait for one another.
const ITEM_UNITS: u64 = 2;

/// A key of small pieces that a worker takes side by side costs so many of others: those of several heads are loaded. With
/// this number the fastest of 28 cuts that were measured on an H200 are chosen. (By a fit to their times it is 2.4: 3.2 µs
/// for 80 keys of three heads, 1.35 for 80 of 192 rows.)
const SMALL_KEY: u64 = 2;

/// Chunks that the longest segment is cut into at most.
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

/// The best size, a multiple of `kv_unit`, or one that cuts nothing.
pub(super) fn best_chunk(
    segments: impl Iterator<Item = Extent> + Clone,
    desc: &AttentionDesc,
    tiling: &Tiling,
    LongSegments(long): &mut LongSegments,
) -> Result<u32> {
    let longest = segments.clone().map(|s| s.keys).max().unwrap_or(0);
    let shortest = chunk_of(longest, MOST_CHUNKS, tiling);
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
            false => short.add(&Pieces::of(&segment, u32::MAX, tiling)),
        }
    }
    let mut best = (u64::MAX, u32::MAX);
    for chunks in 1..=MOST_CHUNKS {
        let chunk = chunk_of(longest, chunks, tiling);
        let cut = Cut::of(long, chunk, tiling);
        if cut.splits > most_splits(desc, tiling) as u64 {
            break;
        }
        let time = cut.time(&short, chunk, desc, tiling);
        if time < best.0 {
            best = (time, if chunks == 1 { u32::MAX } else { chunk });
        }
    }
    Ok(best.1)
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
}

impl Pieces {
    fn of(segment: &Extent, chunk: u32, tiling: &Tiling) -> Pieces {
        let workers = &tiling.workers;
        let is_small = (workers.small).include(segment.rows, segment.keys.min(chunk));
        let (of_item, price) = match is_small {
            true => (workers.small.of_item, SMALL_KEY),
            false => (workers.of_item, 1),
        };
        let (keys, chunk) = (u64::from(segment.keys), u64::from(chunk));
        let pieces = u64::from(segment.rows.div_ceil(tiling.q_tile)) * u64::from(of_item);
        Pieces {
            count: pieces * keys.div_ceil(chunk).max(1),
            keys: (pieces * price).saturating_mul(keys),
            whole: match is_small {
                true => 0,
                false => pieces * ((2 * keys + chunk) / (2 * chunk)),
            },
        }
    }

    fn add(&mut self, more: &Pieces) {
        self.count += more.count;
        self.keys = self.keys.saturating_add(more.keys);
        self.whole += more.whole;
    }
}

/// What a size of chunks makes of the long segments.
#[derive(Debug, Default)]
struct Cut {
    pieces: Pieces,
    /// Items more than there are tiles.
    splits: u64,
    /// Partial rows more than there are with no split.
    parts: u64,
}

impl Cut {
    fn of(long: &[Extent], chunk: u32, tiling: &Tiling) -> Cut {
        let mut cut = Cut::default();
        for segment in long {
            cut.pieces.add(&Pieces::of(segment, chunk, tiling));
            let more = u64::from(segment.keys.div_ceil(chunk).max(1) - 1);
            cut.splits += u64::from(segment.rows.div_ceil(tiling.q_tile)) * more;
            let first = u64::from(!segment.is_part && more > 0);
            cut.parts += u64::from(segment.rows) * (more + first);
        }
        cut
    }

    /// In keys of a worker, times the number of workers.
    fn time(&self, short: &Pieces, chunk: u32, desc: &AttentionDesc, tiling: &Tiling) -> u64 {
        let workers = u64::from(tiling.workers.all);
        let item = ITEM_UNITS * u64::from(tiling.kv_unit);
        let rounds = |pieces: u64| pieces.div_ceil(workers) * workers;
        let whole = rounds(self.pieces.whole).saturating_mul(u64::from(chunk));
        let keys = short.keys.saturating_add(self.pieces.keys).max(whole);
        let items = rounds(short.count + self.pieces.count).saturating_mul(item);
        let part = 2 * u64::from(desc.num_qo_heads) * u64::from(desc.head_dim_vo) * 4;
        let parts = (self.parts * part).div_ceil(desc.kv_bytes().max(1));
        keys.saturating_add(items).saturating_add(parts)
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
        invariant_chunk: u32::MAX,
        combine_units: 8,
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
            shared_levels: 2,
            new_kv: None,
        }
    }

    fn chunk(shared: &[(u32, u32)], own: (u32, u32)) -> u32 {
        let part = |rows, keys| Extent {
            rows,
            keys,
            is_part: true,
        };
        let shared = shared.iter().map(|&(rows, keys)| part(rows, keys));
        let own = (0..own.0).map(|_| part(1, own.1));
        best_chunk(
            shared.chain(own),
            &desc(),
            &TILING,
            &mut LongSegments::default(),
        )
        .unwrap()
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

    /// Of the cuts that were measured on an H200, these were the fastest.
    #[test]
    fn small_items_beside_long_ones_are_cut_as_is_fastest() {
        let tiling = Tiling {
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
        let part = |rows, keys| Extent {
            rows,
            keys,
            is_part: true,
        };
        let documents = vec![part(16, 4080); 8];
        for (shared, own, chunks) in [
            (vec![part(256, 8160)], (256, 288), 2..=2),
            (vec![part(256, 32720)], (256, 304), 5..=5),
            (vec![part(64, 8160)], (64, 288), 5..=6),
            (
                [vec![part(128, 32720)], documents].concat(),
                (128, 304),
                4..=4,
            ),
        ] {
            let longest = shared[0].keys;
            let all = (shared.into_iter()).chain((0..own.0).map(|_| part(1, own.1)));
            let chunk = best_chunk(all.clone(), &desc(), &tiling, &mut LongSegments::default());
            let cut = longest.div_ceil(chunk.unwrap());
            assert!(
                chunks.contains(&cut),
                "{cut} chunks of {longest}, not {chunks:?}"
            );
        }
    }

    #[test]
    fn what_fills_the_device_is_not_cut() {
        assert_eq!(chunk(&[], (512, 300)), u32::MAX);
        assert_eq!(chunk(&[(48 * 33, 4000)], (0, 0)), u32::MAX);
    }
}
