//! What is shared of a batch whose lengths are on the device. The host has the prefixes, and chooses the segments: which
//! requests share how many keys at most, and which segment lies around which. The device has the lengths, and cuts the batch
//! (`kernels/plan/plan_cascade.cu`): a segment ends at the last key that all of its requests have and see whole, and what
//! lies behind the segments of a request is its own. So what the host was told of the prefixes bounds what is read together,
//! and the lengths say what is read at all, as they do where the host has both.
//!
//! Whether a prefix pays is estimated as if every request had one query row, which is what most have, and all of the
//! prefix. All else follows `cascade`. Only the chunk is not chosen by time: entries are cut as the requests of a
//! flat plan on the device are, by a number of splits, since one block of threads has to choose while a step waits for it.

use super::cascade::{CascadeScratch, share};
use super::reserve::reserve;
use crate::error::Result;
use crate::problem::{
    AttentionDesc, HostBatch, Keys, Pages, Requests, SharedPrefix, SharedSegment, Tiling, WorkList,
};

/// Lists in `work` the segments that pay of a batch with so many requests. False where none does.
///
/// # Errors
/// `OutOfMemory` where a list cannot grow.
pub fn cascade_on_device(
    batch_size: u32,
    desc: &AttentionDesc,
    tiling: &Tiling,
    prefixes: &[SharedPrefix],
    scratch: &mut CascadeScratch,
    work: &mut WorkList,
) -> Result<bool> {
    work.clear();
    // How many keys requests have of their own is not known.
    let any_own_keys = Tiling {
        own_key_bytes: 0,
        ..*tiling
    };
    share_imagined(batch_size, desc, &any_own_keys, prefixes, scratch)?;
    reserve("segments", &mut work.segments, scratch.segments.len())?;
    work.segments
        .extend(scratch.segments.iter().map(|segment| SharedSegment {
            requests: segment.requests.start as u32..segment.requests.end as u32,
            kv_end: segment.keys.end,
            parent: segment.parent,
        }));
    Ok(!work.segments.is_empty())
}

/// Whether it pays, outside of graphs, that the requests of the largest batch of a problem, which have a row each, share two
/// thirds of their keys.
///
/// Batches of a graph have one kernel, and they may share more or less. Of 400 random ones whose handles were for no larger
/// ones, on an H200, 22 were more than 3 % slower than the flat plan where all of the keys had to pay, the worst by 83 %, and 11
/// with two thirds, the worst by 18 %; all together take 0.3 % less. With half it is one, but 16 requests of 2048 shared keys
/// and 128 of their own, which take 19 µs instead of 24, would share nothing.
///
/// # Errors
/// `OutOfMemory` where a list cannot grow.
pub fn may_share(desc: &AttentionDesc, tiling: &Tiling) -> Result<bool> {
    let most = SharedPrefix {
        requests: 0..desc.max_batch_size,
        kv_len: desc.max_kv_len - desc.max_kv_len / 3,
    };
    let desc = AttentionDesc {
        graph: false,
        ..*desc
    };
    let scratch = &mut CascadeScratch::default();
    share_imagined(desc.max_batch_size, &desc, tiling, &[most], scratch)?;
    Ok(!scratch.segments.is_empty())
}

/// Lists the shared segments that pay where requests have a row and as many keys as there may be.
fn share_imagined(
    batch_size: u32,
    desc: &AttentionDesc,
    tiling: &Tiling,
    prefixes: &[SharedPrefix],
    scratch: &mut CascadeScratch,
) -> Result<()> {
    let [mut qo_indptr, mut kv_len] = std::mem::take(&mut scratch.imagined);
    let shared = imagine(batch_size, desc.max_kv_len, &mut qo_indptr, &mut kv_len).and_then(|()| {
        let batch = HostBatch {
            qo_indptr: &qo_indptr,
            kv_len: &kv_len,
            keys: Keys::All,
            window_left: None,
            pages: Pages::Ragged { indptr: &[] },
            num_pages: 0,
            max_page_id: -1,
            planned: Requests::All,
        };
        share(&batch, desc, tiling, prefixes, scratch)
    });
    scratch.imagined = [qo_indptr, kv_len];
    shared
}

/// A row for every request, and as many keys as there may be.
fn imagine(
    batch_size: u32,
    max_kv_len: u32,
    qo_indptr: &mut Vec<i32>,
    kv_len: &mut Vec<i32>,
) -> Result<()> {
    let n = batch_size as usize;
    qo_indptr.clear();
    kv_len.clear();
    reserve("requests", qo_indptr, n + 1)?;
    reserve("requests", kv_len, n)?;
    qo_indptr.extend(0..=batch_size as i32);
    kv_len.resize(n, max_kv_len as i32);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::cascade::tests::{assert_rows_meet_their_keys_once, desc, offsets, prefixes};
    use crate::problem::{CombineItem, NO_PARTIAL, SmallItems, TailCosts, WorkItem, Workers};
    use proptest::prelude::*;
    use std::ops::Range;

    fn tiling(q_tile: u32, max_splits: u32) -> Tiling {
        Tiling {
            q_tile,
            q_parts: 1,
            kv_unit: 16,
            unit_bytes: u32::MAX,
            max_splits,
            max_shares: 0,
            tail: TailCosts::NO_TAIL,
            takes_shares: false,
            least_gain: 0,
            rows_of_unit: 0,
            invariant_chunk: u32::MAX,
            combine_units: 0,
            own_key_bytes: 0,
            workers: Workers {
                all: 4,
                of_item: 1,
                small: SmallItems::NONE,
            },
        }
    }

    /// What `kernels/plan/plan_cascade.cu` keeps: the requests and, behind them, the segments.
    #[derive(Debug, Default)]
    struct Entry {
        request: usize,
        rows: Range<u32>,
        keys: Range<u32>,
        parent: Option<usize>,
        is_segment: bool,
        chunks: u32,
        partial: Option<u32>,
    }

    /// The plan that the kernel makes.
    struct Model<'a> {
        lens: &'a [(i32, i32)],
        qo_indptr: Vec<i32>,
        tiling: &'a Tiling,
        entries: Vec<Entry>,
    }

    impl Model<'_> {
        fn segment(&self, segment: &SharedSegment) -> Entry {
            let has_rows = |&b: &usize| self.lens[b].0 > 0;
            let all = segment.requests.start as usize..segment.requests.end as usize;
            let with_rows = || all.clone().filter(has_rows);
            let Some(first) = with_rows().next() else {
                return Entry {
                    keys: 0..segment.kv_end,
                    is_segment: true,
                    ..Entry::default()
                };
            };
            let seen = with_rows().map(|b| (self.lens[b].1 - self.lens[b].0).max(0) as u32);
            let seen = seen.min().unwrap_or(0).min(segment.kv_end);
            let unit = self.tiling.kv_unit;
            let start = self.qo_indptr[first] as u32;
            Entry {
                request: first,
                rows: start..self.qo_indptr[all.end] as u32,
                keys: 0..seen / unit * unit,
                is_segment: true,
                parent: segment.parent.map(|parent| self.lens.len() + parent),
                ..Entry::default()
            }
        }

        fn request(&self, b: usize, segments: &[SharedSegment]) -> Entry {
            let holds = |s: &SharedSegment| s.requests.contains(&(b as u32));
            let innermost = segments.iter().rposition(holds);
            Entry {
                request: b,
                rows: self.qo_indptr[b] as u32..self.qo_indptr[b + 1] as u32,
                keys: 0..self.lens[b].1 as u32,
                parent: innermost.map(|segment| self.lens.len() + segment),
                ..Entry::default()
            }
        }

        /// Leaves to every entry the keys behind those of the segment around it.
        fn share(&mut self, segments: &[SharedSegment]) {
            let requests = (0..self.lens.len()).map(|b| self.request(b, segments));
            let shared = segments.iter().map(|segment| self.segment(segment));
            self.entries = requests.chain(shared).collect();
            for e in 0..self.entries.len() {
                let start = self.entries[e]
                    .parent
                    .map_or(0, |p| self.entries[p].keys.end);
                let entry = &mut self.entries[e];
                entry.keys.start = start.min(entry.keys.end);
            }
        }

        fn tiles(&self, entry: &Entry) -> u32 {
            match entry.is_segment && entry.keys.is_empty() {
                true => 0,
                false => (entry.rows.len() as u32).div_ceil(self.tiling.q_tile),
            }
        }

        fn chunks(&self, entry: &Entry, chunk: u32) -> u32 {
            let least = u32::from(!entry.is_segment);
            match self.tiles(entry) {
                0 => least,
                _ => (entry.keys.len() as u32).div_ceil(chunk).max(least),
            }
        }

        /// The smallest that makes no more splits than are allowed.
        fn chunk(&self) -> u32 {
            let tiles: u32 = self.entries.iter().map(|entry| self.tiles(entry)).sum();
            let most = self.tiling.max_splits;
            let budget = most.saturating_sub(tiles).max(most / 2);
            let splits = |chunk| {
                let of = |entry| self.tiles(entry) * (self.chunks(entry, chunk).max(1) - 1);
                self.entries.iter().map(of).sum::<u32>()
            };
            let mut units = 1..=1 << 20;
            let fits = units.find(|units| splits(units * self.tiling.kv_unit) <= budget);
            fits.unwrap() * self.tiling.kv_unit
        }

        fn around(&self, e: usize) -> impl Iterator<Item = &Entry> {
            let parent = |entry: &&Entry| entry.parent.map(|parent| &self.entries[parent]);
            std::iter::successors(Some(&self.entries[e]), parent)
        }

        fn lay_out(&mut self, chunk: u32) {
            for e in 0..self.entries.len() {
                self.entries[e].chunks = self.chunks(&self.entries[e], chunk);
            }
            let mut next = 0;
            for e in 0..self.entries.len() {
                let parts: u32 = self.around(e).map(|entry| entry.chunks).sum();
                let entry = &mut self.entries[e];
                let rows = entry.rows.len() as u32 * entry.chunks;
                if rows > 0 && (entry.is_segment || parts > 1) {
                    entry.partial = Some(next);
                    next += rows;
                }
            }
        }

        /// A tile's rows lie together, once for every chunk.
        fn partial_row(&self, entry: &Entry, row: u32, c: u32) -> u32 {
            let start = row / self.tiling.q_tile * self.tiling.q_tile;
            let len = self.tiling.q_tile.min(entry.rows.len() as u32 - start);
            entry.partial.unwrap() + start * entry.chunks + c * len + row - start
        }

        fn items(&self, chunk: u32) -> Vec<WorkItem> {
            let mut items = Vec::new();
            for entry in &self.entries {
                let rows = entry.rows.len() as u32;
                for q_start in (0..rows).step_by(self.tiling.q_tile as usize) {
                    for c in 0..entry.chunks {
                        let kv_start = entry.keys.start + c * chunk;
                        let own_rows = if entry.is_segment { 0 } else { rows };
                        items.push(WorkItem {
                            request: entry.request as u32,
                            q_start,
                            q_len: self.tiling.q_tile.min(rows - q_start),
                            kv_start,
                            kv_end: (kv_start + chunk).min(entry.keys.end),
                            partial: entry
                                .partial
                                .map_or(NO_PARTIAL, |_| self.partial_row(entry, q_start, c)),
                            q_token: (entry.rows.start + q_start) as i32,
                            position: entry.keys.end as i32 - own_rows as i32 + q_start as i32,
                            ..WorkItem::default()
                        });
                    }
                }
            }
            items
        }

        fn combine(&self, work: &mut WorkList) {
            for (b, request) in self.entries[..self.lens.len()].iter().enumerate() {
                if request.partial.is_none() {
                    continue;
                }
                for token in request.rows.clone() {
                    let first = work.partials.len();
                    for entry in self.around(b) {
                        let row = token - entry.rows.start;
                        let chunks = (0..entry.chunks).rev();
                        let parts = chunks.map(|c| self.partial_row(entry, row, c));
                        work.partials.extend(parts);
                    }
                    work.combines.push(CombineItem {
                        q_token: token,
                        first: first as u32,
                        count: (work.partials.len() - first) as u32,
                        reserved: 0,
                    });
                }
            }
        }
    }

    /// What the device makes of the segments in `work`.
    fn cut(lens: &[(i32, i32)], tiling: &Tiling, work: &mut WorkList) {
        let mut model = Model {
            lens,
            qo_indptr: offsets(lens),
            tiling,
            entries: Vec::new(),
        };
        model.share(&work.segments);
        let chunk = model.chunk();
        model.lay_out(chunk);
        work.items = model.items(chunk);
        model.combine(work);
    }

    proptest! {
        /// Whether requests have what prefixes say of them or not.
        #[test]
        fn rows_meet_their_keys_once(
            lens in prop::collection::vec((0i32..9, 0i32..400), 1..10),
            (first, step) in (0u32..200, 0u32..80),
            (q_tile, max_splits) in (1u32..9, 0u32..20),
            levels in 1u32..5,
        ) {
            let lens: Vec<(i32, i32)> = lens.into_iter().map(|(q, own)| (q, own.max(q))).collect();
            let (desc, tiling) = (desc(&lens, levels), tiling(q_tile, max_splits));
            let mut list = Vec::new();
            prefixes(0..lens.len() as u32, first, step, &mut list);
            let mut work = WorkList::default();
            let scratch = &mut CascadeScratch::default();
            let shares =
                cascade_on_device(lens.len() as u32, &desc, &tiling, &list, scratch, &mut work).unwrap();
            prop_assert_eq!(shares, !work.segments.is_empty());
            for segment in &work.segments {
                let parent = segment.parent.map(|parent| &work.segments[parent]);
                prop_assert!(segment.kv_end % tiling.kv_unit == 0 && segment.kv_end > parent.map_or(0, |p| p.kv_end));
                prop_assert!(parent.is_none_or(|p| p.requests.start <= segment.requests.start && segment.requests.end <= p.requests.end));
            }
            cut(&lens, &tiling, &mut work);
            assert_rows_meet_their_keys_once(&lens, &desc, &tiling, &list, &work);
        }
    }

    /// Documents of few keys pay beside a prefix that pays for the combine kernel, and not alone.
    #[test]
    fn one_prefix_pays_for_the_combine_kernel() {
        let lens = [(1, 4096); 16];
        let prefix = |requests, kv_len| SharedPrefix { requests, kv_len };
        let tiling = Tiling {
            combine_units: 5,
            ..tiling(16, 64)
        };
        let desc = AttentionDesc {
            graph: false,
            ..desc(&lens, 2)
        };
        let (scratch, work) = (&mut CascadeScratch::default(), &mut WorkList::default());
        let mut number = |list: &[SharedPrefix]| {
            cascade_on_device(16, &desc, &tiling, list, scratch, work).unwrap();
            work.segments.len()
        };
        assert_eq!(number(&[prefix(0..16, 3072), prefix(8..16, 3584)]), 2);
        assert_eq!(number(&[prefix(8..16, 512)]), 0);
        assert_eq!(may_share(&desc, &tiling), Ok(true));
        let short = AttentionDesc {
            max_kv_len: 256,
            graph: true,
            ..desc
        };
        assert_eq!(may_share(&short, &tiling), Ok(false));
    }

    /// 16 requests of 2048 keys, of which 1024 are shared, and 8 of them share 512 more.
    #[test]
    fn what_pays_is_shared() {
        let lens = [(1, 2048); 16];
        let prefix = |requests, kv_len| SharedPrefix { requests, kv_len };
        let list = [prefix(0..16, 1030), prefix(8..16, 1536), prefix(8..9, 2000)];
        let (tiling, scratch) = (tiling(8, 0), &mut CascadeScratch::default());
        let mut work = WorkList::default();
        let mut segments = |desc: &AttentionDesc| {
            cascade_on_device(16, desc, &tiling, &list, scratch, &mut work).unwrap();
            let of = |s: &SharedSegment| (s.requests.clone(), s.kv_end, s.parent);
            work.segments.iter().map(of).collect::<Vec<_>>()
        };
        let (outer, inner) = ((0..16, 1024, None), (8..16, 1536, Some(0)));
        assert_eq!(segments(&desc(&lens, 2)), [outer.clone(), inner]);
        assert_eq!(segments(&desc(&lens, 1)), [outer]);
        let invariant = AttentionDesc {
            batch_invariant: true,
            ..desc(&lens, 2)
        };
        assert_eq!(segments(&invariant), []);
    }
}
