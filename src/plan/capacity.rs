//! How much any plan within a desc can need. Pure arithmetic; where the parts lie is `image`'s concern.

use super::starts::num_copied_page_ids;
use crate::problem::{AttentionDesc, HostBatch, KvStorage, Tiling, WorkList};

/// How many records of each kind a plan has, or can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Requests.
    pub batch_size: usize,
    /// Work items.
    pub items: usize,
    /// Combine items: split rows.
    pub combines: usize,
    /// Entries of the list that the combine items point into.
    pub partials: usize,
    /// Page ids that are copied into the workspace.
    pub page_ids: usize,
    /// Entries of the list of shares.
    pub shares: usize,
}

impl Counts {
    /// Of a batch that was cut.
    pub fn of(batch: &HostBatch<'_>, work: &WorkList) -> Counts {
        Counts {
            batch_size: batch.batch_size(),
            items: work.items.len(),
            combines: work.combines.len(),
            partials: work.partials.len(),
            page_ids: num_copied_page_ids(batch),
            shares: work.shares.len(),
        }
    }
}

/// What no batch within a desc exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Records.
    pub counts: Counts,
    /// Rows of partial results.
    pub partial_rows: usize,
}

impl Capacity {
    /// The bound for batches that the scheduler cuts by `tiling`.
    ///
    /// A request of q rows has ⌈q / T⌉ tiles, so B requests of n rows in all have at most
    /// (n + B (T − 1)) / T. Balanced plans make at most `max_splits` splits, and `most_chunks` says how many chunks
    /// split tiles have. Batch-invariant plans cut every tile into ⌈kv_len / chunk⌉ chunks; there the
    /// number of pages bounds the sum over requests too.
    ///
    /// In a cascade a row has a part in every level that it shares, and levels have no more tiles than their requests
    /// would have; a split adds one more for the rows of a tile. A batch-invariant one shares nothing.
    pub fn new(desc: &AttentionDesc, tiling: &Tiling) -> Capacity {
        let batch_size = desc.max_batch_size as usize;
        let tokens = desc.max_num_tokens as usize;
        let rows = (desc.max_qo_len as usize).min(tokens);
        let tile = tiling.q_tile as usize;
        let levels = desc.shared_levels as usize;
        let tiles = ((tokens.saturating_add(batch_size.saturating_mul(tile - 1))) / tile)
            .min(batch_size.saturating_mul(rows.div_ceil(tile)))
            .min(tokens);
        let (items, combines, partial_rows) = if desc.batch_invariant {
            let chunks = (desc.max_kv_len).div_ceil(tiling.invariant_chunk).max(1) as usize;
            let split = usize::from(chunks > 1);
            let of_all = total_chunks(desc, tiling).min(batch_size.saturating_mul(chunks));
            (
                tiles
                    .saturating_mul(chunks)
                    .min(rows.div_ceil(tile).saturating_mul(of_all)),
                split * tokens,
                split
                    * tokens
                        .saturating_mul(chunks)
                        .min(rows.saturating_mul(of_all)),
            )
        } else {
            let splits = most_splits(desc, tiling);
            let split_rows = splits.saturating_mul(tile.min(rows));
            let parts_in_levels = match levels {
                0 => 0,
                _ => tokens.saturating_mul(levels + 1),
            };
            let parts_of_splits = most_chunks(tiling, splits, tiles).saturating_mul(tile.min(rows));
            (
                tiles
                    .saturating_mul(levels + 1)
                    .saturating_add(splits)
                    .max(narrow_items(tiling)),
                split_rows.saturating_add(parts_in_levels).min(tokens),
                parts_of_splits.saturating_add(parts_in_levels),
            )
        };
        let page_ids = match desc.kv {
            KvStorage::Paged { .. } => desc.max_num_pages as usize,
            KvStorage::Ragged => 0,
        };
        Capacity {
            counts: Counts {
                batch_size,
                items,
                combines,
                partials: partial_rows,
                page_ids,
                shares: match tiling.takes_shares {
                    true => tiling.max_shares as usize + 2,
                    false => 0,
                },
            },
            partial_rows,
        }
    }
}

impl Capacity {
    /// What neither of two exceeds.
    pub fn max(self, other: Capacity) -> Capacity {
        let (a, b) = (self.counts, other.counts);
        Capacity {
            counts: Counts {
                batch_size: a.batch_size.max(b.batch_size),
                items: a.items.max(b.items),
                combines: a.combines.max(b.combines),
                partials: a.partials.max(b.partials),
                page_ids: a.page_ids.max(b.page_ids),
                shares: a.shares.max(b.shares),
            },
            partial_rows: self.partial_rows.max(other.partial_rows),
        }
    }
}

/// Narrow tiles are made where all of them run at a time.
fn narrow_items(tiling: &Tiling) -> usize {
    match tiling.q_parts {
        1 => 0,
        _ => tiling.workers.items_at_a_time(),
    }
}

/// Splits that a balanced plan makes at most. The shared keys of a cascade are few long tiles, and items of two levels
/// that end together are worth more parts.
pub(super) fn most_splits(desc: &AttentionDesc, tiling: &Tiling) -> usize {
    const OF_CASCADES: usize = 4;
    match desc.shared_levels {
        0 => tiling
            .max_splits
            .max(tiling.max_shares)
            .max(tiling.tail.most_chunks) as usize,
        _ => (tiling.max_splits as usize).saturating_mul(OF_CASCADES),
    }
}

/// Chunks that split tiles of a balanced plan have together, at most.
///
/// Chunks of one size: with M for `max_splits` and n tiles there are at most M - n splits, or M / 2 where that is more
/// (`schedule`). k tiles that are split have k chunks more than splits, and k is at most the number of either. So they
/// have M - n + n chunks at most, or 2 · M / 2. Equal shares: as many splits, and each may be of a tile of its own. A tail:
/// `TailCosts::most_chunks`.
fn most_chunks(tiling: &Tiling, max_splits: usize, tiles: usize) -> usize {
    match tiling.max_shares {
        0 => max_splits,
        _ => max_splits.saturating_add(max_splits.min(tiles)),
    }
}

/// Chunks of all requests of a batch-invariant plan together: each has its keys' worth and a partial one.
fn total_chunks(desc: &AttentionDesc, tiling: &Tiling) -> usize {
    let keys = match desc.kv {
        KvStorage::Paged { page_size, .. } => {
            desc.max_num_pages.saturating_mul(u64::from(page_size))
        }
        KvStorage::Ragged => u64::MAX,
    };
    let whole = keys / u64::from(tiling.invariant_chunk);
    usize::try_from(whole.saturating_add(u64::from(desc.max_batch_size))).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::plan::schedule;
    use crate::problem::{Keys, Kind, KvLayout, PageIds, Pages, Requests, TailCosts, Workers};
    use proptest::prelude::*;

    fn desc(lens: &[(i32, i32)], batch_invariant: bool) -> AttentionDesc {
        let page_size = 4;
        AttentionDesc {
            kind: Kind::Prefill,
            q_dtype: DType::F16,
            kv_format: DType::F16.into(),
            o_dtype: DType::F16,
            num_qo_heads: 4,
            num_kv_heads: 2,
            head_dim_qk: 64,
            head_dim_vo: 64,
            kv: KvStorage::Paged {
                page_size,
                layout: KvLayout::Nhd,
            },
            max_batch_size: lens.len() as u32,
            max_qo_len: lens.iter().map(|l| l.0).max().unwrap_or(0) as u32,
            max_num_tokens: lens.iter().map(|l| l.0).sum::<i32>() as u32,
            max_kv_len: lens.iter().map(|l| l.1).max().unwrap_or(0).max(1) as u32,
            max_num_pages: lens
                .iter()
                .map(|l| u64::from((l.1 as u32).div_ceil(page_size)))
                .sum(),
            graph: false,
            batch_invariant,
            fp8_products: false,
            mask_items: false,
            shared_levels: 0,
            new_kv: None,
        }
    }

    proptest! {
        #[test]
        fn no_batch_exceeds_the_capacity(
            lens in prop::collection::vec((0i32..90, 0i32..700), 1..12),
            (q_part, q_parts) in (1u32..40, 1u32..4),
            all in 1u32..100,
            max_splits in 0u32..50,
            invariant_chunk in 1u32..200,
            batch_invariant: bool,
            max_shares in 0u32..50,
            tail_chunks in 0u32..50,
        ) {
            let tiling = Tiling { q_tile: q_part * q_parts, q_parts, kv_unit: 16, unit_bytes: u32::MAX, max_splits, max_shares, tail: TailCosts { most_chunks: tail_chunks, ..TailCosts::NO_TAIL }, takes_shares: false, least_gain: 0, rows_of_unit: 0, invariant_chunk, combine_units: 0, own_key_bytes: 0, workers: Workers { all, ..Workers::ONE } };
            let desc = desc(&lens, batch_invariant);
            let mut qo_indptr = vec![0];
            qo_indptr.extend(lens.iter().scan(0, |sum, l| { *sum += l.0; Some(*sum) }));
            let kv_len: Vec<i32> = lens.iter().map(|l| l.1).collect();
            let batch = HostBatch {
                qo_indptr: &qo_indptr,
                kv_len: &kv_len,
                keys: Keys::All,
                window_left: None,
                pages: Pages::Table { ids: PageIds::Host(&[]), row_stride: 0 },
                num_pages: 0,
                max_page_id: -1,
                planned: Requests::All,
            };
            let mut work = WorkList::default();
            schedule(&batch, &desc, &tiling, &mut work).unwrap();
            let Capacity { counts, partial_rows } = Capacity::new(&desc, &tiling);
            prop_assert!(work.items.len() <= counts.items);
            prop_assert!(work.combines.len() <= counts.combines);
            prop_assert!(work.partials.len() <= counts.partials);
            prop_assert!(work.partials.iter().all(|&row| (row as usize) < partial_rows));
        }
    }
}
