//! Cuts a batch into work items: query tiles × chunks of keys, the largest first (for prefill: those of
//! the longest request first, its largest first), and lists the merges that put split rows together again.
//!
//! Masks are not known here: layers with different masks and windows share a plan, so an item covers a
//! range of keys and each run clips it. Costs assume a causal mask, which is what most batches have.
//!
//! **Chunk size.** One chunk size serves the whole batch: the smallest multiple of `kv_unit` for which
//! the splits, Σ tiles · (⌈kv_len / chunk⌉ − 1), stay within a budget. So the longest request bounds
//! the tail, few long requests are split finely, and many requests not at all. With budget S, n tiles and
//! K = Σ tiles · kv_len, K / (S + n) ≤ chunk ≤ K / S: the bisection is short. A tile that is split m ≥ 2
//! ways has m partial results and m − 1 splits, so at most 2 · S tiles' rows of partial results exist.
//!
//! **Budget.** `max_splits` less the tiles, so that all items together come to `max_splits`, which is what
//! runs at a time: a few items more than that cost a second wave (8 requests of 8192 keys on an H200:
//! 78.7 µs in 32 items, 87.1 in 40). But no less than half, for one long request among many.
//!
//! **Batch-invariant.** Tiles always start at the request's first row, and the chunk is fixed, so a
//! request is cut the same way in every batch.

use crate::backend::Tiling;
use crate::problem::{AttentionDesc, HostBatch, Kind, MergeItem, NO_PARTIAL, WorkItem, WorkList};

/// Fills `work` with the cut of `batch`. Allocates only while `work` grows to a new largest batch.
pub fn schedule(batch: &HostBatch<'_>, desc: &AttentionDesc, tiling: &Tiling, work: &mut WorkList) {
    let chunk = if desc.batch_invariant {
        tiling.invariant_chunk
    } else {
        smallest_chunk(batch, tiling)
    };
    work.items.clear();
    work.merges.clear();
    let mut partial_rows = 0;
    for b in 0..batch.batch_size() {
        let qo_len = batch.qo_len(b);
        let mut q_start = 0;
        while q_start < qo_len {
            let tile = Tile {
                request: b as u32,
                q_start,
                q_len: tiling.q_tile.min(qo_len - q_start),
                kv_len: batch.kv_len[b] as u32,
                past: i64::from(batch.kv_len[b]) - i64::from(qo_len),
            };
            tile.push(work, &mut partial_rows, chunk);
            q_start += tile.q_len;
        }
    }
    sort(work, batch, desc.kind);
}

/// The order decides only the time: every item writes its own memory. Many tiles of a prefill read the
/// same keys, so those of a request stay together, and a device's cache serves all but the first.
///
/// What is sorted are 16-byte keys that end in the item's index, which also settles ties by request, row
/// and key: comparing items themselves costs half of a plan of 1024 requests.
fn sort(work: &mut WorkList, batch: &HostBatch<'_>, kind: Kind) {
    work.order.clear();
    work.order
        .extend(work.items.iter().zip(0..).map(|(item, index)| {
            let together = match kind {
                Kind::Decode => [0, 0],
                Kind::Prefill => [!(batch.kv_len[item.request as usize] as u32), item.request],
            };
            let [first, second] = together.map(u128::from);
            first << 96 | second << 64 | u128::from(!item.cost) << 32 | index
        }));
    if work.order.is_sorted() {
        return;
    }
    work.order.sort_unstable();
    work.unordered.clone_from(&work.items);
    work.items.clear();
    let ordered = work
        .order
        .iter()
        .map(|&key| work.unordered[key as u32 as usize]);
    work.items.extend(ordered);
}

/// Query rows of one request, before its keys are cut.
struct Tile {
    request: u32,
    q_start: u32,
    q_len: u32,
    kv_len: u32,
    /// Position of the request's first row.
    past: i64,
}

impl Tile {
    fn push(&self, work: &mut WorkList, partial_rows: &mut u32, chunk: u32) {
        // A request without keys still has rows to write: one item with an empty range.
        let num_chunks = self.kv_len.div_ceil(chunk).max(1);
        let split = num_chunks > 1;
        for c in 0..num_chunks {
            let kv_start = c * chunk;
            let kv_end = chunk.saturating_mul(c + 1).min(self.kv_len);
            work.items.push(WorkItem {
                request: self.request,
                q_start: self.q_start,
                q_len: self.q_len,
                kv_start,
                kv_end,
                partial: if split {
                    *partial_rows + c * self.q_len
                } else {
                    NO_PARTIAL
                },
                cost: self.cost(kv_start, kv_end),
                reserved: 0,
            });
        }
        if split {
            work.merges.push(MergeItem {
                request: self.request,
                q_start: self.q_start,
                q_len: self.q_len,
                partial: *partial_rows,
                num_chunks,
                reserved: [0; 3],
            });
            *partial_rows += num_chunks * self.q_len;
        }
    }

    fn cost(&self, kv_start: u32, kv_end: u32) -> u32 {
        let last_visible = self.past + i64::from(self.q_start + self.q_len);
        let keys = (i64::from(kv_end).min(last_visible) - i64::from(kv_start)).max(0);
        u32::try_from(keys * i64::from(self.q_len)).unwrap_or(u32::MAX)
    }
}

fn smallest_chunk(batch: &HostBatch<'_>, tiling: &Tiling) -> u32 {
    let unit = tiling.kv_unit;
    let longest = batch.kv_len.iter().copied().max().unwrap_or(0) as u32;
    let most_units = longest.div_ceil(unit).max(1);
    let whole = most_units.saturating_mul(unit);
    if tiling.max_splits == 0 || whole < longest {
        return u32::MAX;
    }
    let (mut tiles, mut tile_keys) = (0u64, 0u64);
    for b in 0..batch.batch_size() {
        let n = u64::from(batch.qo_len(b).div_ceil(tiling.q_tile));
        tiles += n;
        tile_keys += n * batch.kv_len[b] as u64;
    }
    let splits = split_budget(tiling.max_splits, tiles);
    if splits == 0 {
        return u32::MAX;
    }
    let unit64 = u64::from(unit);
    let mut low = (tile_keys / ((splits + tiles) * unit64)).clamp(1, u64::from(most_units)) as u32;
    let mut high = tile_keys
        .div_ceil(splits * unit64)
        .clamp(1, u64::from(most_units)) as u32;
    while low < high {
        let middle = low + (high - low) / 2;
        if count_splits(batch, tiling, middle * unit) <= splits {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    high * unit
}

/// Splits that a batch of so many tiles may make.
fn split_budget(max_splits: u32, tiles: u64) -> u64 {
    let max_splits = u64::from(max_splits);
    max_splits.saturating_sub(tiles).max(max_splits / 2)
}

/// The splits that chunks of this size make.
fn count_splits(batch: &HostBatch<'_>, tiling: &Tiling, chunk: u32) -> u64 {
    (0..batch.batch_size())
        .map(|b| {
            let tiles = batch.qo_len(b).div_ceil(tiling.q_tile);
            let chunks = (batch.kv_len[b] as u32).div_ceil(chunk).max(1);
            u64::from(tiles) * u64::from(chunks - 1)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::problem::{Kind, KvLayout, KvStorage, PageIds, Pages};
    use proptest::prelude::*;

    fn desc(batch_invariant: bool, kind: Kind) -> AttentionDesc {
        AttentionDesc {
            kind,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
            o_dtype: DType::F32,
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 8,
            head_dim_vo: 8,
            kv: KvStorage::Paged {
                page_size: 16,
                layout: KvLayout::Nhd,
            },
            max_batch_size: 64,
            max_qo_len: 1 << 20,
            max_num_tokens: 1 << 20,
            max_kv_len: 1 << 20,
            max_num_pages: 1 << 20,
            graph: false,
            batch_invariant,
        }
    }

    fn cut(lens: &[(i32, i32)], tiling: &Tiling, batch_invariant: bool) -> WorkList {
        cut_as(lens, tiling, batch_invariant, Kind::Prefill)
    }

    fn cut_as(lens: &[(i32, i32)], tiling: &Tiling, batch_invariant: bool, kind: Kind) -> WorkList {
        let mut qo_indptr = vec![0];
        let mut kv_len = Vec::new();
        for &(q, kv) in lens {
            qo_indptr.push(qo_indptr.last().unwrap() + q);
            kv_len.push(kv);
        }
        let batch = HostBatch {
            qo_indptr: &qo_indptr,
            kv_len: &kv_len,
            pages: Pages::Table {
                ids: PageIds::Host(&[]),
                row_stride: 0,
            },
            max_page_id: -1,
        };
        let mut work = WorkList::default();
        schedule(&batch, &desc(batch_invariant, kind), tiling, &mut work);
        work
    }

    fn tilings() -> impl Strategy<Value = Tiling> {
        (1u32..40, 1u32..40, 0u32..50, 1u32..20).prop_map(|(q_tile, kv_unit, max_splits, n)| {
            Tiling {
                q_tile,
                kv_unit,
                max_splits,
                invariant_chunk: kv_unit * n,
            }
        })
    }

    proptest! {
        #[test]
        fn every_row_and_key_is_covered_once(
            lens in prop::collection::vec((0i32..90, 0i32..700), 0..12),
            tiling in tilings(),
            batch_invariant: bool,
        ) {
            let work = cut(&lens, &tiling, batch_invariant);
            let mut seen: Vec<Vec<u8>> =
                lens.iter().map(|&(q, kv)| vec![0; (q * kv.max(1)) as usize]).collect();
            for item in &work.items {
                let (_, kv_len) = lens[item.request as usize];
                prop_assert!(item.q_len >= 1 && item.q_len <= tiling.q_tile);
                prop_assert_eq!(item.kv_start % tiling.kv_unit, 0);
                prop_assert!(item.kv_end as i32 <= kv_len);
                for q in item.q_start..item.q_start + item.q_len {
                    let keys = if kv_len == 0 { 0..1 } else { item.kv_start..item.kv_end };
                    for k in keys {
                        seen[item.request as usize][(q as i32 * kv_len.max(1)) as usize + k as usize] += 1;
                    }
                }
            }
            for row in seen {
                prop_assert!(row.iter().all(|&count| count == 1));
            }
        }

        #[test]
        fn partial_rows_are_disjoint_and_within_the_bound(
            lens in prop::collection::vec((0i32..90, 0i32..700), 0..12),
            tiling in tilings(),
        ) {
            let work = cut(&lens, &tiling, false);
            let splits: u32 = work.merges.iter().map(|m| m.num_chunks - 1).sum();
            prop_assert!(splits <= tiling.max_splits);
            let rows: u32 = work.merges.iter().map(|m| m.num_chunks * m.q_len).sum();
            prop_assert!(rows <= 2 * tiling.max_splits * tiling.q_tile);
            let mut used = vec![false; rows as usize];
            for item in work.items.iter().filter(|item| item.partial != NO_PARTIAL) {
                for row in item.partial..item.partial + item.q_len {
                    prop_assert!(!std::mem::replace(&mut used[row as usize], true));
                }
            }
            prop_assert!(used.iter().all(|&u| u));
            for merge in &work.merges {
                let mut parts: Vec<_> = work.items.iter()
                    .filter(|i| i.request == merge.request && i.q_start == merge.q_start)
                    .collect();
                parts.sort_by_key(|i| i.kv_start);
                prop_assert_eq!(parts.len(), merge.num_chunks as usize);
                for (c, item) in parts.iter().enumerate() {
                    prop_assert_eq!(item.partial, merge.partial + c as u32 * merge.q_len);
                }
            }
        }

        #[test]
        fn invariant_cuts_do_not_depend_on_the_batch(
            lens in prop::collection::vec((0i32..90, 0i32..700), 1..8),
            tiling in tilings(),
        ) {
            let shape = |work: &WorkList, b: u32| {
                let mut cuts: Vec<_> = work.items.iter().filter(|i| i.request == b)
                    .map(|i| (i.q_start, i.q_len, i.kv_start, i.kv_end, i.partial == NO_PARTIAL))
                    .collect();
                cuts.sort_unstable();
                cuts
            };
            let whole = cut(&lens, &tiling, true);
            for (b, &one) in lens.iter().enumerate() {
                let alone = cut(&[one], &tiling, true);
                prop_assert_eq!(shape(&alone, 0), shape(&whole, b as u32));
            }
        }

        #[test]
        fn no_item_is_larger_than_the_fair_share_allows(
            kv in prop::collection::vec(1i32..5000, 1..40),
            max_splits in 1u32..200,
        ) {
            let lens: Vec<_> = kv.iter().map(|&kv| (1, kv)).collect();
            let tiling = Tiling { q_tile: 4, kv_unit: 16, max_splits, invariant_chunk: 256 };
            let work = cut(&lens, &tiling, false);
            let total: i32 = kv.iter().sum();
            let budget = split_budget(max_splits, lens.len() as u64) as u32;
            let bound = match budget {
                0 => u32::MAX,
                budget => (total as u32).div_ceil(budget) + 16,
            };
            prop_assert!(work.items.iter().all(|i| i.kv_end - i.kv_start <= bound));
        }

        #[test]
        fn items_that_fit_at_a_time_are_not_exceeded_by_splits(
            kv in prop::collection::vec(1i32..5000, 1..40),
            max_splits in 1u32..200,
        ) {
            let lens: Vec<_> = kv.iter().map(|&kv| (1, kv)).collect();
            let tiling = Tiling { q_tile: 4, kv_unit: 16, max_splits, invariant_chunk: 256 };
            let work = cut(&lens, &tiling, false);
            let most = (max_splits as usize).max(lens.len() + max_splits as usize / 2);
            prop_assert!(work.items.len() <= most);
        }
    }

    fn order(lens: &[(i32, i32)], kind: Kind) -> Vec<(u32, u32)> {
        let tiling = Tiling {
            q_tile: 64,
            kv_unit: 16,
            max_splits: 0,
            invariant_chunk: 256,
        };
        let work = cut_as(lens, &tiling, false, kind);
        work.items.iter().map(|i| (i.request, i.q_start)).collect()
    }

    #[test]
    fn the_largest_item_of_decode_comes_first() {
        let lens = [(1, 10), (64, 640), (1, 700)];
        assert_eq!(order(&lens, Kind::Decode), [(1, 0), (2, 0), (0, 0)]);
    }

    #[test]
    fn prefill_keeps_requests_together() {
        let lens = [(128, 640), (128, 640), (1, 700)];
        assert_eq!(
            order(&lens, Kind::Prefill),
            [(2, 0), (0, 64), (0, 0), (1, 64), (1, 0)]
        );
    }
}
