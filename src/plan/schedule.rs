//! Cuts a batch into work items: query tiles × chunks of keys, the largest first (for prefill: those of
//! the longest request first, its largest first), and lists the rows whose parts are to be combined.
//!
//! Masks are not known here: layers with different masks and windows share a plan, so an item covers a
//! range of keys and each run clips it. Costs assume a causal mask, which is what most batches have. Where the batch says
//! that no run sees further left than a window, keys before it have no items.
//!
//! `cut` says where keys are cut; `item_order` puts the items in order.
//!
//! **Batch-invariant.** Tiles always start at the request's first row, and the chunk is fixed, so a
//! request is cut the same way in every batch.

use super::cut::Cut;
use super::divisor::Divisor;
use super::item_order::{by_share, sort};
use super::reserve::reserve;
use super::starts::request_starts;
use crate::error::Result;
use crate::problem::{
    AttentionDesc, CombineItem, HostBatch, NO_PARTIAL, Tiling, WorkItem, WorkList,
};
use std::ops::Range;

/// Fills `work` with the cut of `batch`. Allocates only while `work` grows to a new largest batch.
///
/// # Errors
/// `OutOfMemory` where it cannot grow.
pub fn schedule(
    batch: &HostBatch<'_>,
    desc: &AttentionDesc,
    tiling: &Tiling,
    work: &mut WorkList,
) -> Result<()> {
    work.clear();
    work.workers_of_item = tiling.workers.of_item;
    request_starts(batch, desc.kv.page_size(), &mut work.starts)?;
    let mut cut = Cut::of(batch, desc, tiling);
    let takes_shares = tiling.takes_shares && matches!(cut, Cut::Shares { .. });
    make_room(batch, tiling, cut, work)?;
    let mut partial_rows = 0;
    for b in 0..batch.batch_size() {
        let qo_len = batch.planned_rows(b);
        let mut q_start = 0;
        while q_start < qo_len {
            let tile = Tile {
                request: b as u32,
                q_start,
                q_len: tiling.q_tile.min(qo_len - q_start),
                keys: batch.keys_in_window(b, q_start, tiling.kv_unit),
                page_start: work.starts.page[b],
                first_token: batch.qo_indptr[b],
                past: i64::from(batch.kv_len[b]) - i64::from(qo_len),
            };
            tile.push(work, &mut partial_rows, &mut cut);
            cut.pass(batch.num_keys_in_window(b, tiling.kv_unit));
            q_start += tile.q_len;
        }
    }
    match takes_shares {
        true => by_share(work),
        false => {
            work.shares.clear();
            sort(work, batch, desc.kind)
        }
    }
}

/// Room for the cut, so that making it does not allocate.
fn make_room(batch: &HostBatch<'_>, tiling: &Tiling, cut: Cut, work: &mut WorkList) -> Result<()> {
    let chunk = match cut {
        Cut::Chunks(chunk) => chunk,
        Cut::Shares { .. } => return make_room_for_shares(batch, tiling, work),
    };
    let q_tile = Divisor::new(tiling.q_tile);
    let (mut items, mut combines, mut partials) = (0usize, 0usize, 0usize);
    for b in 0..batch.batch_size() {
        let rows = batch.planned_rows(b);
        let keys = batch.num_keys_in_window(b, tiling.kv_unit);
        let chunks = chunk.divide_up(keys).max(1) as usize;
        items = items.saturating_add((q_tile.divide_up(rows) as usize).saturating_mul(chunks));
        if chunks > 1 {
            combines += rows as usize;
            partials = partials.saturating_add((rows as usize).saturating_mul(chunks));
        }
    }
    reserve("work items", &mut work.items, items)?;
    reserve("combine items", &mut work.combines, combines)?;
    reserve("partial rows", &mut work.partials, partials)
}

/// Every share but the last may split a tile. The rows of a split tile have a part on both sides.
fn make_room_for_shares(batch: &HostBatch<'_>, tiling: &Tiling, work: &mut WorkList) -> Result<()> {
    let splits = tiling.max_shares as usize;
    let (mut tiles, mut rows) = (0usize, 0u32);
    for b in 0..batch.batch_size() {
        tiles += batch.planned_rows(b).div_ceil(tiling.q_tile) as usize;
        rows = rows.max(batch.planned_rows(b).min(tiling.q_tile));
    }
    let split_rows = splits.saturating_mul(rows as usize);
    reserve("work items", &mut work.items, tiles.saturating_add(splits))?;
    reserve("shares", &mut work.shares, splits.saturating_add(2))?;
    reserve("combine items", &mut work.combines, split_rows)?;
    reserve(
        "partial rows",
        &mut work.partials,
        split_rows.saturating_mul(2),
    )
}

/// Query rows of one request, before its keys are cut.
struct Tile {
    request: u32,
    q_start: u32,
    q_len: u32,
    keys: Range<u32>,
    page_start: i64,
    /// The request's first row within the batch.
    first_token: i32,
    /// Position of the request's first row.
    past: i64,
}

impl Tile {
    fn push(&self, work: &mut WorkList, partial_rows: &mut u32, cut: &mut Cut) {
        let (mut kv_start, mut num_chunks) = (self.keys.start, 0);
        // A request without keys still has rows to write: one item with an empty range.
        while kv_start < self.keys.end || num_chunks == 0 {
            let kv_end = cut.end(kv_start, &self.keys);
            let split = num_chunks > 0 || kv_end < self.keys.end;
            if cut.begins_share(kv_start, &self.keys) {
                work.shares.push(work.items.len() as u32);
            }
            work.items.push(WorkItem {
                request: self.request,
                q_start: self.q_start,
                q_len: self.q_len,
                kv_start,
                kv_end,
                partial: if split {
                    *partial_rows + num_chunks * self.q_len
                } else {
                    NO_PARTIAL
                },
                cost: self.cost(kv_start, kv_end),
                reserved: 0,
                page_start: self.page_start,
                q_token: self.first_token + self.q_start as i32,
                position: (self.past + i64::from(self.q_start)) as i32,
            });
            (kv_start, num_chunks) = (kv_end, num_chunks + 1);
        }
        if num_chunks > 1 {
            self.combine(work, *partial_rows, num_chunks);
            *partial_rows += num_chunks * self.q_len;
        }
    }

    /// Row `r` of chunk `c` lies at partial row `partial + c · q_len + r`.
    fn combine(&self, work: &mut WorkList, partial: u32, num_chunks: u32) {
        for row in 0..self.q_len {
            work.combines.push(CombineItem {
                q_token: (self.first_token as u32) + self.q_start + row,
                first: work.partials.len() as u32,
                count: num_chunks,
                reserved: 0,
            });
            let rows = (0..num_chunks).map(|c| partial + c * self.q_len + row);
            work.partials.extend(rows);
        }
    }

    fn cost(&self, kv_start: u32, kv_end: u32) -> u32 {
        let last_visible = self.past + i64::from(self.q_start + self.q_len);
        let keys = (i64::from(kv_end).min(last_visible) - i64::from(kv_start)).max(0);
        u32::try_from(keys * i64::from(self.q_len)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests;
