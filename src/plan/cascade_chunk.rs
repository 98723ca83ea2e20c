//! The size of the chunks that the segments of a cascade are cut into: one for all of them, the one whose estimated time
//! is the least. What segments are, and their items, is `cascade`'s.
//!
//! Time is counted in keys that one worker reads. No run is faster than its keys divided by its workers. Nor is it
//! faster than whole chunks dealt out in rounds: items of shared keys are few and long, so that one more of them than
//! there are workers takes twice as long. Shorter items fill what longer ones leave. And every part of a row is written
//! and read, in the time of as many bytes of keys.

use super::capacity::most_splits;
use super::reserve::reserve;
use crate::error::Result;
use crate::problem::{AttentionDesc, Tiling};

/// What the first keys of an item take longer than further ones, in units of `kv_unit` keys. Loads of the next item hide it
/// from all but the items of a round that wait for one another.
const ITEM_UNITS: u64 = 2;

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
    let mut all = Work::default();
    for segment in segments {
        all.items += tiles(&segment, tiling);
        all.keys += tiles(&segment, tiling) * u64::from(segment.keys);
        if segment.keys > shortest {
            long.push(segment);
        }
    }
    let mut best = (u64::MAX, u32::MAX);
    for chunks in 1..=MOST_CHUNKS {
        let chunk = chunk_of(longest, chunks, tiling);
        let cut = Cut::of(long, chunk, tiling);
        if cut.splits > most_splits(desc, tiling) as u64 {
            break;
        }
        let time = cut.time(&all, chunk, desc, tiling);
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

fn tiles(segment: &Extent, tiling: &Tiling) -> u64 {
    u64::from(segment.rows.div_ceil(tiling.q_tile))
}

/// Of all segments, before they are cut.
#[derive(Default)]
struct Work {
    items: u64,
    keys: u64,
}

/// What a size of chunks makes of the long segments.
struct Cut {
    /// Items of a whole chunk.
    whole: u64,
    /// Items more than there are tiles.
    splits: u64,
    /// Partial rows more than there are with no split.
    parts: u64,
}

impl Cut {
    fn of(long: &[Extent], chunk: u32, tiling: &Tiling) -> Cut {
        let mut cut = Cut {
            whole: 0,
            splits: 0,
            parts: 0,
        };
        for segment in long {
            let more = u64::from(segment.keys.div_ceil(chunk).max(1) - 1);
            cut.whole += tiles(segment, tiling) * u64::from(segment.keys / chunk);
            cut.splits += tiles(segment, tiling) * more;
            let first = u64::from(!segment.is_part && more > 0);
            cut.parts += u64::from(segment.rows) * (more + first);
        }
        cut
    }

    /// In keys of a worker, times the number of workers.
    fn time(&self, all: &Work, chunk: u32, desc: &AttentionDesc, tiling: &Tiling) -> u64 {
        let (workers, of_item) = (
            u64::from(tiling.workers.all),
            u64::from(tiling.workers.of_item),
        );
        let item = ITEM_UNITS * u64::from(tiling.kv_unit);
        let rounds = |items: u64| (items * of_item).div_ceil(workers) * workers;
        let whole = rounds(self.whole).saturating_mul(u64::from(chunk));
        let keys = all.keys.saturating_mul(of_item).max(whole);
        let items = rounds(all.items + self.splits).saturating_mul(item);
        let part = 2 * u64::from(desc.num_qo_heads) * u64::from(desc.head_dim_vo) * 4;
        let parts = (self.parts * part).div_ceil(desc.kv_bytes().max(1));
        keys.saturating_add(items).saturating_add(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{Kind, KvLayout, KvStorage, Workers};

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

    #[test]
    fn what_fills_the_device_is_not_cut() {
        assert_eq!(chunk(&[], (512, 300)), u32::MAX);
        assert_eq!(chunk(&[(48 * 33, 4000)], (0, 0)), u32::MAX);
    }
}
