//! How a plan lies in the caller's workspace: how much every plan within a desc can need, and the offset
//! of each part. Pure arithmetic; nothing here touches memory.

use crate::backend::Tiling;
use crate::cuda::params::{ItemPlace, PLAN_REQUEST_BYTES, PlanView};
use crate::problem::{AttentionDesc, KvStorage, MergeItem, WorkItem};

/// Alignment of the workspace and of its parts.
pub const ALIGNMENT: usize = 256;

/// How many records of each kind a plan has, or can have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Requests.
    pub batch_size: usize,
    /// Work items.
    pub items: usize,
    /// Merges.
    pub merges: usize,
    /// Page ids that are copied to the device.
    pub page_ids: usize,
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
    /// (n + B (T − 1)) / T. Balanced plans make at most `max_splits` splits, and m splits of a tile need
    /// m + 1 ≤ 2 m chunks. Batch-invariant plans cut every tile into ⌈kv_len / chunk⌉ chunks; there the
    /// number of pages bounds the sum over requests too.
    pub fn new(desc: &AttentionDesc, tiling: &Tiling) -> Capacity {
        let batch_size = desc.max_batch_size as usize;
        let tokens = desc.max_num_tokens as usize;
        let rows = (desc.max_qo_len as usize).min(tokens);
        let tile = tiling.q_tile as usize;
        let tiles = ((tokens.saturating_add(batch_size.saturating_mul(tile - 1))) / tile)
            .min(batch_size.saturating_mul(rows.div_ceil(tile)))
            .min(tokens);
        let (items, merges, partial_rows) = if desc.batch_invariant {
            let chunks = (desc.max_kv_len).div_ceil(tiling.invariant_chunk).max(1) as usize;
            let split = usize::from(chunks > 1);
            let of_all = total_chunks(desc, tiling).min(batch_size.saturating_mul(chunks));
            (
                tiles
                    .saturating_mul(chunks)
                    .min(rows.div_ceil(tile).saturating_mul(of_all)),
                split * tiles,
                split
                    * tokens
                        .saturating_mul(chunks)
                        .min(rows.saturating_mul(of_all)),
            )
        } else {
            let splits = tiling.max_splits as usize;
            (
                tiles.saturating_add(splits),
                splits.min(tiles),
                2 * splits * tile.min(rows),
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
                merges,
                page_ids,
            },
            partial_rows,
        }
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

/// Offsets, in bytes from the start of the workspace, of what `plan` writes. The same layout serves the
/// staging buffer on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Layout {
    pub counts: usize,
    pub next_tile: usize,
    pub qo_indptr: usize,
    pub kv_len: usize,
    pub page_start: usize,
    pub mask_bytes_start: usize,
    pub mask_bits_start: usize,
    pub items: usize,
    pub places: usize,
    pub merges: usize,
    pub page_ids: usize,
    /// One past the page ids: the end of what is copied from the host.
    pub end: usize,
}

impl Layout {
    /// Places the parts for so many records.
    pub fn new(counts: &Counts) -> Layout {
        let mut end = 0;
        let mut part = |count: usize, size: usize| {
            let start = end;
            end = (start + count * size).next_multiple_of(ALIGNMENT);
            start
        };
        Layout {
            counts: part(4, 4),
            next_tile: part(1, 4),
            qo_indptr: part(counts.batch_size + 1, 4),
            kv_len: part(counts.batch_size, 4),
            page_start: part(counts.batch_size, 8),
            mask_bytes_start: part(counts.batch_size, 8),
            mask_bits_start: part(counts.batch_size, 8),
            items: part(counts.items, size_of::<WorkItem>()),
            places: part(counts.items, size_of::<ItemPlace>()),
            merges: part(counts.merges, size_of::<MergeItem>()),
            page_ids: part(counts.page_ids, 4),
            end,
        }
    }
}

/// Offsets of everything, for the largest plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Regions {
    /// What `plan` writes.
    pub plan: Layout,
    /// For planning on the device: a record for each request, and where its items and its merges start.
    pub requests: usize,
    /// `[max_batch_size]` u32.
    pub first_item: usize,
    /// `[max_batch_size]` u32.
    pub first_merge: usize,
    /// Partial lse.
    pub partial_lse: usize,
    /// Partial outputs.
    pub partial_o: usize,
    /// The size of it all.
    pub end: usize,
}

impl Regions {
    /// Places everything.
    pub fn new(desc: &AttentionDesc, capacity: &Capacity) -> Regions {
        let plan = Layout::new(&capacity.counts);
        let partial_heads = capacity
            .partial_rows
            .saturating_mul(desc.num_qo_heads as usize);
        let after = |start: usize, bytes: usize| {
            start
                .saturating_add(bytes)
                .checked_next_multiple_of(ALIGNMENT)
                .unwrap_or(usize::MAX)
        };
        let batch_size = capacity.counts.batch_size;
        let requests = plan.end;
        let first_item = after(requests, PLAN_REQUEST_BYTES * batch_size);
        let first_merge = after(first_item, 4 * batch_size);
        let partial_lse = after(first_merge, 4 * batch_size);
        let partial_o = after(partial_lse, partial_heads.saturating_mul(4));
        let end = after(
            partial_o,
            partial_heads.saturating_mul(4 * desc.head_dim_vo as usize),
        );
        Regions {
            plan,
            requests,
            first_item,
            first_merge,
            partial_lse,
            partial_o,
            end,
        }
    }

    /// Device addresses of a plan that lies at `base` by `layout`.
    pub fn view(&self, layout: &Layout, base: u64, page_ids: Option<u64>) -> PlanView {
        let at = |offset: usize| base + offset as u64;
        PlanView {
            qo_indptr: at(layout.qo_indptr),
            kv_len: at(layout.kv_len),
            page_start: at(layout.page_start),
            page_ids: page_ids.unwrap_or(at(layout.page_ids)),
            items: at(layout.items),
            merges: at(layout.merges),
            counts: at(layout.counts),
            next_tile: at(layout.next_tile),
            partial_o: at(self.partial_o),
            partial_lse: at(self.partial_lse),
            places: at(layout.places),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::plan::schedule;
    use crate::problem::{HostBatch, Kind, KvLayout, PageIds, Pages, WorkList};
    use proptest::prelude::*;

    fn desc(lens: &[(i32, i32)], batch_invariant: bool) -> AttentionDesc {
        let page_size = 4;
        AttentionDesc {
            kind: Kind::Prefill,
            q_dtype: DType::F16,
            kv_dtype: DType::F16,
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
        }
    }

    proptest! {
        #[test]
        fn no_batch_exceeds_the_capacity(
            lens in prop::collection::vec((0i32..90, 0i32..700), 1..12),
            q_tile in 1u32..40,
            max_splits in 0u32..50,
            invariant_chunk in 1u32..200,
            batch_invariant: bool,
        ) {
            let tiling = Tiling { q_tile, kv_unit: 16, max_splits, invariant_chunk };
            let desc = desc(&lens, batch_invariant);
            let mut qo_indptr = vec![0];
            qo_indptr.extend(lens.iter().scan(0, |sum, l| { *sum += l.0; Some(*sum) }));
            let kv_len: Vec<i32> = lens.iter().map(|l| l.1).collect();
            let batch = HostBatch {
                qo_indptr: &qo_indptr,
                kv_len: &kv_len,
                pages: Pages::Table { ids: PageIds::Host(&[]), row_stride: 0 },
                num_pages: 0,
            max_page_id: -1,
            };
            let mut work = WorkList::default();
            schedule(&batch, &desc, &tiling, &mut work);
            let capacity = Capacity::new(&desc, &tiling);
            prop_assert!(work.items.len() <= capacity.counts.items);
            prop_assert!(work.merges.len() <= capacity.counts.merges);
            let rows: u32 = work.merges.iter().map(|m| m.num_chunks * m.q_len).sum();
            prop_assert!(rows as usize <= capacity.partial_rows);
        }
    }
}
