//! Cuts a batch whose requests share keys: keys that several requests have in common are read once for all of their
//! query rows, and the parts of every row are put together by the same combine items that split rows have.
//!
//! A *segment* is some neighbouring query rows against a range of keys that all of them see whole: the keys of a shared
//! prefix beyond those of the prefix around it, or, as the last part of every row, a request's own keys. Shared segments
//! end at multiples of what chunks of keys are multiples of; the few keys up to the end of the prefix stay with the
//! requests, whose page tables have them too. So the items of a cascade are ordinary ones, with keys counted from the
//! start of a request, and kernels do not know of cascades.
//!
//! **What pays.** Sharing saves reading keys again and costs a part more for every row, which is written and read. The
//! times of both are compared in bytes. Re-reads mostly come from the L2 cache, at about twice the rate. And there is a
//! kernel more, which puts the parts together: the first prefix that is shared has to be worth it. A prefix that does not
//! pay is left to its requests, so a cascade is no slower than the flat plan but for what the estimate is off.
//!
//! **Windows and masks** are not known to a plan, and rows of several requests stand at different positions. Items of
//! shared keys say nothing of positions: a run that may hide some of these keys, or whose logits depend on distance, takes
//! the flat plan.
//!
//! **Batch-invariant.** What a request shares depends on the others, so there nothing is shared.

use super::cascade_chunk::{Cuts, Extent, LongSegments, best_cuts};
use super::item_order::{by_cost, small_last};
use super::reserve::reserve;
use super::starts::request_starts;
use crate::error::Result;
use crate::problem::{
    AttentionDesc, CombineItem, HostBatch, NO_PARTIAL, SharedPrefix, Tiling, WorkItem, WorkList,
};
use std::ops::Range;

/// Keys that are read again cost this part of those that are read first.
const REREAD: u64 = 2;

/// Parts of rows are written and read, and each costs this many times as much as that.
const PART: u64 = 2;

/// A launch more and the first loads of its kernel, as a factor of what [`Tiling::combine_units`] says, in quarters.
///
/// This and `PART`, with `Tiling::own_key_bytes`, are a choice among some: of 2809 random batches with one prefix on an H200, 32/8
/// to 8/1 heads of 64, 128 and 256, a cascade was more than 3 % slower than the flat plan in 83 with four quarters, 1 and 0. With
/// 5, 2 and 32 it is in 31, and its times are 0.2 % longer on average, for what is not shared.
const COMBINE_QUARTERS: u64 = 5;

/// Beside its keys an item of own keys costs as much as so many of them, each of which costs [`Tiling::own_key_bytes`]: it is
/// often a request with few keys of its own. Of 370 random batches that shared on an H200, 11 were more than 3 % slower than the
/// flat plan, the worst by 33 %; with this 6 are, by up to 22 %, and all together take 0.2 % less.
const ITEM_KEYS: u64 = 1024;

/// Some query rows against a range of keys.
#[derive(Debug, Clone)]
pub(super) struct Segment {
    pub requests: Range<usize>,
    pub keys: Range<u32>,
    /// The segment around this one, among the segments.
    pub parent: Option<usize>,
    /// Pieces that the keys are cut into.
    chunks: u32,
    /// Its first partial row.
    partial: u32,
}

/// What cutting cascades needs from step to step.
#[derive(Debug, Default)]
pub struct CascadeScratch {
    pub(super) segments: Vec<Segment>,
    /// Prefixes around the present one, the innermost last: which segment is theirs.
    around: Vec<(u32, Option<usize>)>,
    long: LongSegments,
    /// Query rows and keys that requests are taken to have whose lengths are on the device.
    pub(super) imagined: [Vec<i32>; 2],
}

/// Fills `work` with the cut of a batch that shares `prefixes`, each of which comes behind those around it. False where
/// no prefix pays; then the flat plan is the better one, and `work` is empty, but for graphs, whose runs may not take the
/// other plan.
///
/// # Errors
/// `OutOfMemory` where a list cannot grow.
pub fn cascade(
    batch: &HostBatch<'_>,
    desc: &AttentionDesc,
    tiling: &Tiling,
    prefixes: &[SharedPrefix],
    scratch: &mut CascadeScratch,
    work: &mut WorkList,
) -> Result<bool> {
    work.clear();
    share(batch, desc, tiling, prefixes, scratch)?;
    let CascadeScratch { segments, long, .. } = scratch;
    let shares = !segments.is_empty();
    if !shares && !desc.graph {
        return Ok(false);
    }
    own_keys(batch, segments);
    let Cuts { chunk, small } = cut(batch, desc, tiling, segments, long)?;
    request_starts(batch, desc.kv.page_size(), &mut work.starts)?;
    list(batch, (tiling, chunk), segments, work)?;
    by_cost(work)?;
    small_last(work, small)?;
    Ok(shares)
}

/// Lists the shared segments that pay, with room for the own keys of every request behind them.
pub(super) fn share(
    batch: &HostBatch<'_>,
    desc: &AttentionDesc,
    tiling: &Tiling,
    prefixes: &[SharedPrefix],
    scratch: &mut CascadeScratch,
) -> Result<()> {
    let CascadeScratch {
        segments, around, ..
    } = scratch;
    segments.clear();
    let most = prefixes.len().saturating_add(batch.batch_size());
    reserve("segments", segments, most)?;
    if desc.batch_invariant {
        return Ok(());
    }
    around.clear();
    reserve("shared prefixes", around, prefixes.len())?;
    let unit = tiling.kv_unit;
    for prefix in prefixes {
        // The first one with rows, whose pages are read: an idle request may have none.
        let end = prefix.requests.end as usize;
        let first = (prefix.requests.start as usize..end).find(|&b| batch.qo_len(b) > 0);
        let requests = first.unwrap_or(end)..end;
        while around
            .last()
            .is_some_and(|(end, _)| *end <= prefix.requests.start)
        {
            around.pop();
        }
        let parent = around.last().and_then(|(_, segment)| *segment);
        let depth = depth(segments, parent);
        let start = parent.map_or(0, |parent: usize| segments[parent].keys.end);
        // All rows see all keys of the context.
        let contexts = requests
            .clone()
            .filter(|&b| batch.qo_len(b) > 0)
            .map(|b| (batch.kv_len[b] as u32).saturating_sub(batch.qo_len(b)));
        let seen = contexts.min().unwrap_or(0).min(prefix.kv_len);
        let keys = start..seen / unit * unit;
        let is_worth = depth < desc.shared_levels
            && keys.start < keys.end
            && pays(batch, desc, tiling, (&requests, &keys), segments.is_empty());
        let segment = match is_worth {
            false => parent,
            true => {
                segments.push(Segment {
                    requests,
                    keys,
                    parent,
                    chunks: 1,
                    partial: 0,
                });
                Some(segments.len() - 1)
            }
        };
        around.push((prefix.requests.end, segment));
    }
    Ok(())
}

/// Segments around the rows of a prefix whose parent is this one.
fn depth(segments: &[Segment], mut parent: Option<usize>) -> u32 {
    let mut depth = 0;
    while let Some(segment) = parent {
        (parent, depth) = (segments[segment].parent, depth + 1);
    }
    depth
}

/// Whether keys are worth sharing. The first that are shared pay for the kernel that puts parts together too.
fn pays(
    batch: &HostBatch<'_>,
    desc: &AttentionDesc,
    tiling: &Tiling,
    (requests, keys): (&Range<usize>, &Range<u32>),
    is_first: bool,
) -> bool {
    let rows = rows_of(batch, requests);
    let q_tile = u64::from(tiling.q_tile);
    let of_requests: u64 = requests
        .clone()
        .map(|b| u64::from(batch.qo_len(b)).div_ceil(q_tile))
        .sum();
    let saved = of_requests.saturating_sub(u64::from(rows).div_ceil(q_tile));
    let key_bytes = desc.kv_bytes() * u64::from(desc.num_kv_heads);
    // A page may be as long as a length can say.
    let saved_keys = saved * u64::from(keys.end - keys.start);
    let saved_bytes = saved_keys.saturating_mul(key_bytes) / REREAD;
    // The part of the shared keys and that of the row's own, which otherwise went to the output: written and read.
    let part = u64::from(desc.num_qo_heads) * u64::from(desc.head_dim_vo) * 4;
    let parts_bytes = 4 * part * u64::from(rows);
    // Runs of a graph take this plan in any case.
    if desc.graph {
        return saved_bytes > parts_bytes;
    }
    let units = u64::from(tiling.combine_units) * u64::from(tiling.max_splits);
    let overhead = match is_first {
        true => units * u64::from(tiling.kv_unit) * key_bytes * COMBINE_QUARTERS / 4,
        false => 0,
    };
    let own_keys: u64 = (requests.clone())
        .filter(|&b| batch.qo_len(b) > 0)
        .map(|b| ITEM_KEYS + u64::from((batch.kv_len[b] as u32).saturating_sub(keys.end)))
        .sum();
    let own_bytes = own_keys * u64::from(desc.num_kv_heads) * u64::from(tiling.own_key_bytes);
    saved_bytes > PART * parts_bytes + overhead + own_bytes
}

fn rows_of(batch: &HostBatch<'_>, requests: &Range<usize>) -> u32 {
    (batch.qo_indptr[requests.end] - batch.qo_indptr[requests.start]) as u32
}

/// Adds a segment for the own keys of every request, in the order of the batch.
fn own_keys(batch: &HostBatch<'_>, segments: &mut Vec<Segment>) {
    let shared = segments.len();
    let mut next = 0;
    let mut innermost: Option<usize> = None;
    for b in 0..batch.batch_size() {
        while innermost.is_some_and(|segment| segments[segment].requests.end <= b) {
            innermost = innermost.and_then(|segment| segments[segment].parent);
        }
        while next < shared && segments[next].requests.start <= b {
            innermost = Some(next);
            next += 1;
        }
        let start = innermost.map_or(0, |segment| segments[segment].keys.end);
        segments.push(Segment {
            requests: b..b + 1,
            keys: start..(batch.kv_len[b] as u32).max(start),
            parent: innermost,
            chunks: 1,
            partial: 0,
        });
    }
}

/// Decides into chunks of how many keys segments are cut, and which items are small.
fn cut(
    batch: &HostBatch<'_>,
    desc: &AttentionDesc,
    tiling: &Tiling,
    segments: &mut [Segment],
    long: &mut LongSegments,
) -> Result<Cuts> {
    let shared = segments.len() - batch.batch_size();
    let extents = segments.iter().enumerate().map(|(at, segment)| Extent {
        rows: rows_of(batch, &segment.requests),
        keys: segment.keys.end - segment.keys.start,
        is_part: at < shared || segment.parent.is_some(),
    });
    let cuts = match desc.batch_invariant {
        true => Cuts {
            chunk: tiling.invariant_chunk,
            small: tiling.workers.small,
        },
        false => best_cuts(extents, desc, tiling, long)?,
    };
    for segment in segments {
        let keys = segment.keys.end - segment.keys.start;
        segment.chunks = keys.div_ceil(cuts.chunk).max(1);
    }
    Ok(cuts)
}

/// Lists the items of all segments, and the parts of every row.
fn list(
    batch: &HostBatch<'_>,
    (tiling, chunk): (&Tiling, u32),
    segments: &mut [Segment],
    work: &mut WorkList,
) -> Result<()> {
    let shared = segments.len() - batch.batch_size();
    let (mut items, mut partial_rows) = (0usize, 0u32);
    for (at, segment) in segments.iter_mut().enumerate() {
        let rows = rows_of(batch, &segment.requests);
        let is_split = at < shared || segment.parent.is_some() || segment.chunks > 1;
        let tiles = rows.div_ceil(tiling.q_tile) as usize;
        items = items.saturating_add(tiles.saturating_mul(segment.chunks as usize));
        segment.partial = match is_split {
            true => partial_rows,
            false => NO_PARTIAL,
        };
        partial_rows += if is_split { rows * segment.chunks } else { 0 };
    }
    reserve("work items", &mut work.items, items)?;
    reserve("combine items", &mut work.combines, batch.num_tokens())?;
    let mut parts = 0usize;
    for own in &segments[shared..] {
        parts += rows_of(batch, &own.requests) as usize * parts_of(segments, own) as usize;
    }
    reserve("partial rows", &mut work.partials, parts)?;
    for (at, segment) in segments.iter().enumerate() {
        push_items(batch, (tiling, chunk), segment, at < shared, work);
    }
    for own in &segments[shared..] {
        if own.partial != NO_PARTIAL {
            combine(batch, segments, own, work);
        }
    }
    Ok(())
}

/// Parts of a row of a request.
fn parts_of(segments: &[Segment], own: &Segment) -> u32 {
    let mut parts = own.chunks;
    let mut parent = own.parent;
    while let Some(at) = parent {
        parts += segments[at].chunks;
        parent = segments[at].parent;
    }
    parts
}

fn push_items(
    batch: &HostBatch<'_>,
    (tiling, chunk): (&Tiling, u32),
    segment: &Segment,
    is_shared: bool,
    work: &mut WorkList,
) {
    let b = segment.requests.start;
    let rows = rows_of(batch, &segment.requests);
    // All rows see shared keys. `api` bounds the sum of keys and rows.
    let past = match is_shared {
        true => segment.keys.end as i32,
        false => batch.kv_len[b] - batch.qo_len(b) as i32,
    };
    for Range {
        start: q_start,
        end,
    } in row_tiles(rows, tiling)
    {
        let q_len = end - q_start;
        for c in 0..segment.chunks {
            let kv_start = segment.keys.start + c * chunk;
            let kv_end = kv_start.saturating_add(chunk).min(segment.keys.end);
            work.items.push(WorkItem {
                request: b as u32,
                q_start,
                q_len,
                kv_start,
                kv_end,
                partial: match segment.partial {
                    NO_PARTIAL => NO_PARTIAL,
                    first => first + c * rows + q_start,
                },
                cost: u32::try_from(u64::from(q_len) * u64::from(kv_end - kv_start))
                    .unwrap_or(u32::MAX),
                reserved: 0,
                page_start: work.starts.page[b],
                q_token: batch.qo_indptr[b] + q_start as i32,
                position: past + q_start as i32,
            });
        }
    }
}

/// As many tiles as rows need. Where there are small items, tiles have a multiple of their rows, as equal as may be.
fn row_tiles(rows: u32, tiling: &Tiling) -> impl Iterator<Item = Range<u32>> {
    let unit = match tiling.workers.small.rows {
        0 => tiling.q_tile,
        rows => rows,
    };
    let (units, tiles) = (rows.div_ceil(unit), rows.div_ceil(tiling.q_tile));
    let start = move |tile: u32| {
        let units = u64::from(units) * u64::from(tile) / u64::from(tiles);
        (units as u32).saturating_mul(unit).min(rows)
    };
    (0..tiles).map(move |tile| start(tile)..start(tile + 1))
}

/// Combine items of a request's rows: the parts in the order of the keys.
fn combine(batch: &HostBatch<'_>, segments: &[Segment], own: &Segment, work: &mut WorkList) {
    let first_token = batch.qo_indptr[own.requests.start];
    for row in 0..rows_of(batch, &own.requests) {
        let token = first_token as u32 + row;
        let first = work.partials.len();
        // From the own keys outwards, then turned round.
        let mut at = Some(own);
        while let Some(segment) = at {
            let rows = rows_of(batch, &segment.requests);
            let within = token - batch.qo_indptr[segment.requests.start] as u32;
            let parts = (0..segment.chunks).rev();
            work.partials
                .extend(parts.map(|c| segment.partial + c * rows + within));
            at = segment.parent.map(|parent| &segments[parent]);
        }
        work.partials[first..].reverse();
        work.combines.push(CombineItem {
            q_token: token,
            first: first as u32,
            count: (work.partials.len() - first) as u32,
            reserved: 0,
        });
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::plan::Capacity;
    use crate::problem::{
        Keys, Kind, KvLayout, KvStorage, PageIds, Pages, Requests, SmallItems, TailCosts, Workers,
    };
    use proptest::prelude::*;

    const PAGE: u32 = 4;

    pub fn desc(lens: &[(i32, i32)], levels: u32) -> AttentionDesc {
        let keys = |l: &(i32, i32)| l.1 as u32;
        AttentionDesc {
            kind: Kind::Prefill,
            q_dtype: DType::F16,
            kv_format: DType::F16.into(),
            o_dtype: DType::F16,
            num_qo_heads: 1,
            num_kv_heads: 1,
            head_dim_qk: 8,
            head_dim_vo: 8,
            kv: KvStorage::Paged {
                page_size: PAGE,
                layout: KvLayout::Nhd,
            },
            max_batch_size: lens.len() as u32,
            max_qo_len: lens.iter().map(|l| l.0 as u32).max().unwrap_or(0).max(1),
            max_num_tokens: lens.iter().map(|l| l.0 as u32).sum::<u32>().max(1),
            max_kv_len: lens.iter().map(keys).max().unwrap_or(0).max(1),
            max_num_pages: lens.iter().map(|l| u64::from(keys(l).div_ceil(PAGE))).sum(),
            graph: true,
            batch_invariant: false,
            fp8_products: false,
            mask_items: false,
            shared_levels: levels,
            new_kv: None,
        }
    }

    /// Prefixes that halve the requests, each longer than the one around it.
    pub fn prefixes(requests: Range<u32>, kv_len: u32, step: u32, list: &mut Vec<SharedPrefix>) {
        if requests.len() < 2 {
            return;
        }
        list.push(SharedPrefix {
            requests: requests.clone(),
            kv_len,
        });
        let middle = requests.start + requests.len() as u32 / 2;
        prefixes(requests.start..middle, kv_len + step, step, list);
        prefixes(middle..requests.end, kv_len + 2 * step, step, list);
    }

    /// How often each token meets each key of its request.
    struct Met<'a> {
        lens: &'a [(i32, i32)],
        qo_indptr: &'a [i32],
        counts: Vec<Vec<u32>>,
    }

    impl Met<'_> {
        fn request(&self, token: i32) -> usize {
            (0..self.lens.len())
                .find(|&b| token < self.qo_indptr[b + 1])
                .unwrap()
        }

        fn add(&mut self, item: &WorkItem, shared: &[SharedPrefix]) {
            for i in 0..item.q_len as i32 {
                let token = item.q_token + i;
                let b = self.request(token);
                let own = b == item.request as usize;
                let (first, last) = (item.request.min(b as u32), item.request.max(b as u32));
                let is_shared = shared.iter().any(|prefix| {
                    prefix.requests.start <= first
                        && last < prefix.requests.end
                        && item.kv_end <= prefix.kv_len
                });
                assert!(own || is_shared, "{item:?} has a row of request {b}");
                let position = self.lens[b].1 - self.lens[b].0 + token - self.qo_indptr[b];
                let stated = item.position + i;
                let end = item.kv_end as i32;
                let sees_all = stated >= end && position >= end;
                assert!(sees_all || own && stated == position, "{item:?}");
                for key in item.kv_start..item.kv_end {
                    self.counts[token as usize][key as usize] += 1;
                }
            }
        }
    }

    /// In parts that are combined, within the memory of the desc.
    #[track_caller]
    pub fn assert_rows_meet_their_keys_once(
        lens: &[(i32, i32)],
        desc: &AttentionDesc,
        tiling: &Tiling,
        shared: &[SharedPrefix],
        work: &WorkList,
    ) {
        // As kernels for shared keys are created: a tile has rows of several requests.
        let kernel = AttentionDesc {
            max_qo_len: desc.max_num_tokens,
            ..*desc
        };
        let capacity = Capacity::new(&kernel, tiling);
        assert!(work.items.len() <= capacity.counts.items);
        assert!(work.combines.len() <= capacity.counts.combines);
        assert!(work.partials.len() <= capacity.counts.partials);
        let qo_indptr = offsets(lens);
        let rows = |l: &(i32, i32)| vec![vec![0; l.1 as usize]; l.0 as usize];
        let mut met = Met {
            lens,
            qo_indptr: &qo_indptr,
            counts: lens.iter().flat_map(rows).collect(),
        };
        let mut rows_of_parts = std::collections::HashMap::new();
        let mut alone = std::collections::HashSet::new();
        for item in &work.items {
            met.add(item, shared);
            for i in 0..item.q_len {
                let token = item.q_token as u32 + i;
                match item.partial {
                    NO_PARTIAL => assert!(alone.insert(token)),
                    partial => assert!(rows_of_parts.insert(partial + i, token).is_none()),
                }
            }
        }
        assert!(met.counts.iter().flatten().all(|&n| n == 1));
        let has_room = |row: &u32| (*row as usize) < capacity.partial_rows;
        assert!(rows_of_parts.keys().all(has_room));
        for combine in &work.combines {
            assert!(!alone.contains(&combine.q_token) && combine.count >= 2);
            let parts = &work.partials[combine.first as usize..][..combine.count as usize];
            for part in parts {
                assert_eq!(rows_of_parts.remove(part), Some(combine.q_token));
            }
        }
        assert!(rows_of_parts.is_empty());
        assert_eq!(alone.len() + work.combines.len(), met.counts.len());
    }

    /// Of the query rows.
    pub fn offsets(lens: &[(i32, i32)]) -> Vec<i32> {
        let mut offsets = vec![0];
        offsets.extend(lens.iter().scan(0, |sum, l| {
            *sum += l.0;
            Some(*sum)
        }));
        offsets
    }

    proptest! {
        /// Every row meets every key of its request once, in parts that are combined, within the memory of the desc.
        #[test]
        fn rows_meet_their_keys_once(
            lens in prop::collection::vec((0i32..9, 0i32..400), 1..10),
            (first, step) in (0u32..200, 0u32..80),
            (q_tile, max_splits, workers, small) in (1u32..9, 0u32..20, 1u32..40, (0usize..3, 0u32..100)),
            levels in 1u32..5,
        ) {
            let lens: Vec<(i32, i32)> = lens.into_iter().map(|(q, own)| (q, own.max(q))).collect();
            let desc = desc(&lens, levels);
            let tiling = Tiling { q_tile, q_parts: 1, kv_unit: 16, unit_bytes: u32::MAX, max_splits, max_shares: 0, tail: TailCosts::NO_TAIL, takes_shares: false, least_gain: 0, rows_of_unit: 0, invariant_chunk: u32::MAX, combine_units: 0, own_key_bytes: 0, workers: Workers { all: workers, of_item: 3, small: SmallItems { rows: [0, 1, q_tile][small.0], keys: small.1, of_item: 2 } } };
            let qo_indptr = offsets(&lens);
            let kv_len: Vec<i32> = lens.iter().map(|l| l.1).collect();
            let columns = kv_len.iter().map(|&n| (n as u32).div_ceil(PAGE)).max().unwrap_or(0) as usize;
            let ids = vec![0; columns * lens.len()];
            let batch = HostBatch {
                qo_indptr: &qo_indptr,
                kv_len: &kv_len,
                keys: Keys::All,
                window_left: None,
                pages: Pages::Table { ids: PageIds::Host(&ids), row_stride: columns },
                num_pages: 0,
                max_page_id: 0,
                planned: Requests::All,
            };
            let mut list = Vec::new();
            prefixes(0..lens.len() as u32, first, step, &mut list);
            let mut work = WorkList::default();
            cascade(&batch, &desc, &tiling, &list, &mut CascadeScratch::default(), &mut work).unwrap();

            let small = tiling.workers.small;
            let (large, last) = work.items.split_at(work.items.len() - work.small as usize);
            prop_assert!(last.iter().all(|item| item.q_len <= small.rows));
            prop_assert!(large.iter().all(|item| item.q_len <= q_tile));
            // Those of few rows and more keys are of one kind.
            let is_small = |item: &WorkItem| small.include(item.q_len, item.kv_end - item.kv_start);
            prop_assert!(small.rows == 0 || !large.iter().any(is_small));
            let all_small = large.iter().all(|item| item.q_len > small.rows);
            prop_assert!(all_small || last.iter().all(is_small));

            assert_rows_meet_their_keys_once(&lens, &desc, &tiling, &list, &work);
        }
    }
}
