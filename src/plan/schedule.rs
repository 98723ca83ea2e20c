//! Cuts a batch into work items: query tiles × chunks of keys, the largest first (for prefill in many rounds: those
//! of the longest request first, its largest first), and lists the rows whose parts are to be combined.
//!
//! Masks are not known here: layers with different masks and windows share a plan, so an item covers a
//! range of keys and each run clips it. Costs assume a causal mask, which is what most batches have. Where the batch says
//! that no run sees further left than a window, keys before it have no items.
//!
//! `cut` says where keys are cut; `item_order` puts the items in order.
//!
//! **Batch-invariant.** Tiles always start at the request's first row, and the chunk is fixed, so a
//! request is cut the same way in every batch.

use super::cut::{Cut, tiles_share_keys};
use super::divisor::Divisor;
use super::item_order::{by_cost, by_length, by_request, by_share};
use super::reserve::reserve;
use super::starts::request_starts;
use super::tile::{Tile, tiles};
use crate::error::Result;
use crate::problem::{
    AttentionDesc, CombineItem, HostBatch, Kind, NO_PARTIAL, Tiling, WorkItem, WorkList, Workers,
};

/// [`Tiling::least_gain`] where tiles could be narrow instead. Split keys take 8 µs more on an H100, and a unit of 80 keys of a
/// narrow tile takes one at head_dim 128: 64 rows on 640 keys, in eight units, take 18 µs whole and 25 split, on 800, in ten, 19
/// and 25. Units of wider rows take as much longer as they have more products: 22 rows of 256 on 741 keys take 24 µs whole and
/// 18 split, on an H200.
pub fn least_gain_beside_narrow(desc: &AttentionDesc, tiling: &Tiling) -> u32 {
    const UNITS: u32 = 8;
    const PRODUCTS_OF_UNIT: u32 = 80 * (128 + 128);
    let products = tiling.kv_unit * (desc.head_dim_qk + desc.head_dim_vo);
    let units = (UNITS * PRODUCTS_OF_UNIT).div_ceil(products).min(UNITS);
    tiling.least_gain.max(units)
}

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
    let narrow = narrowed(batch, desc, tiling);
    let wide = Tiling {
        least_gain: match narrow.q_parts < tiling.q_parts {
            true => least_gain_beside_narrow(desc, tiling),
            false => tiling.least_gain,
        },
        ..*tiling
    };
    let mut cut = Cut::of(batch, desc, &wide, &mut work.free)?;
    let takes_shares = tiling.takes_shares && matches!(cut, Cut::Shares { .. });
    let has_tail = matches!(cut, Cut::Tail(_));
    let tiling = &match cut {
        Cut::Chunks(chunk) if chunk.divisor == u32::MAX => narrow,
        _ => *tiling,
    };
    make_room(batch, tiling, cut, work)?;
    let mut partial_rows = 0;
    for b in 0..batch.batch_size() {
        let place = Place {
            page_start: work.starts.page[b],
            first_token: batch.qo_indptr[b],
        };
        let mut q_start = 0;
        while q_start < batch.planned_rows(b) {
            let tile = Tile::of(batch, b, q_start, tiling);
            push(&tile, &place, work, &mut partial_rows, &mut cut);
            cut.pass(&tile);
            q_start += tile.q_len;
        }
    }
    if takes_shares {
        return by_share(work);
    }
    work.shares.clear();
    if matches!(cut, Cut::Shares { .. }) {
        work.small = work.items.len() as u32;
        return by_cost(work);
    }
    work.small = 0;
    match desc.kind == Kind::Prefill || tiles_share_keys(batch, tiling) {
        true => order_tiles(batch, tiling, has_tail, work),
        false => by_cost(work),
    }
}

/// The order of tiles that may find in the L2 what another one of their request reads. Those of a request stay together, unless
/// that would leave workers idle at the end: where there are few rounds of them, and where lengths are far apart.
fn order_tiles(
    batch: &HostBatch<'_>,
    tiling: &Tiling,
    has_tail: bool,
    work: &mut WorkList,
) -> Result<()> {
    // Rounds that are too few. Of 180 random batches on an H200, those of fewer took 0.97 of the time on average, up to 0.79; of
    // equal lengths and 4 to 8 rounds, 1.02.
    const OF_EQUAL_LENGTHS: usize = 4;
    const OF_UNEQUAL_LENGTHS: usize = 8;
    let unequal = lengths_are_unequal(batch, tiling);
    let few = match unequal {
        true => OF_UNEQUAL_LENGTHS,
        false => OF_EQUAL_LENGTHS,
    };
    let Workers { all, of_item, .. } = tiling.workers;
    let pieces = work.items.len().saturating_mul(of_item as usize);
    if has_tail && !unequal {
        let is_part = |item: &&WorkItem| item.partial != NO_PARTIAL;
        work.small = work.items.iter().filter(is_part).count() as u32;
        return by_request(work, batch, has_tail);
    }
    match has_tail || pieces < few * all as usize {
        true => by_length(work),
        false => by_request(work, batch, false),
    }
}

/// Whether the longest request has more than twice the keys of the mean.
fn lengths_are_unequal(batch: &HostBatch<'_>, tiling: &Tiling) -> bool {
    let keys = (0..batch.batch_size())
        .filter(|&b| batch.planned_rows(b) > 0)
        .map(|b| u64::from(batch.num_keys_in_window(b, tiling.kv_unit)));
    let (count, longest, sum) = keys.fold((0, 0, 0), |(count, longest, sum), keys| {
        (count + 1, keys.max(longest), sum + keys)
    });
    longest * count > 2 * sum
}

/// With the narrowest tiles that all run at a time, where workers would be left over: those of few rows end earlier.
fn narrowed(batch: &HostBatch<'_>, desc: &AttentionDesc, tiling: &Tiling) -> Tiling {
    let most = tiling.workers.items_at_a_time();
    let all_run = |of: &Tiling| tiles(batch, of).take(most + 1).count() <= most;
    match desc.batch_invariant {
        true => *tiling,
        false => tiling.narrower().find(all_run).unwrap_or(*tiling),
    }
}

/// Room for the cut, so that making it does not allocate.
fn make_room(batch: &HostBatch<'_>, tiling: &Tiling, cut: Cut, work: &mut WorkList) -> Result<()> {
    let chunk = match cut {
        Cut::Chunks(chunk) => chunk,
        Cut::Tail(_) => return make_room_for_tail(batch, tiling, work),
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

/// Every chunk may be of a tile of its own.
fn make_room_for_tail(batch: &HostBatch<'_>, tiling: &Tiling, work: &mut WorkList) -> Result<()> {
    let chunks = tiling.tail.most_chunks as usize;
    let items = tiles(batch, tiling).count().saturating_add(chunks);
    reserve("work items", &mut work.items, items)?;
    // A split tile has two chunks or more.
    let rows = chunks.saturating_mul(tiling.q_tile as usize);
    reserve("combine items", &mut work.combines, rows / 2)?;
    reserve("partial rows", &mut work.partials, rows)
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

/// Where the pages and the rows of a request are.
struct Place {
    page_start: i64,
    /// The request's first row within the batch.
    first_token: i32,
}

/// Adds the items of a tile, and what combines them.
fn push(tile: &Tile, place: &Place, work: &mut WorkList, partial_rows: &mut u32, cut: &mut Cut) {
    let (mut kv_start, mut num_chunks) = (tile.keys.start, 0);
    // A request without keys still has rows to write: one item with an empty range.
    while kv_start < tile.keys.end || num_chunks == 0 {
        let kv_end = cut.end(kv_start, tile);
        let split = num_chunks > 0 || kv_end < tile.keys.end;
        if cut.begins_share(kv_start, tile) {
            work.shares.push(work.items.len() as u32);
        }
        let cost = u64::from(tile.seen(&(kv_start..kv_end))) * u64::from(tile.q_len);
        work.items.push(WorkItem {
            request: tile.request as u32,
            q_start: tile.q_start,
            q_len: tile.q_len,
            kv_start,
            kv_end,
            partial: if split {
                *partial_rows + num_chunks * tile.q_len
            } else {
                NO_PARTIAL
            },
            cost: u32::try_from(cost).unwrap_or(u32::MAX),
            reserved: 0,
            page_start: place.page_start,
            q_token: place.first_token + tile.q_start as i32,
            position: (tile.past + i64::from(tile.q_start)) as i32,
        });
        (kv_start, num_chunks) = (kv_end, num_chunks + 1);
    }
    if num_chunks > 1 {
        combine(tile, place, work, *partial_rows, num_chunks);
        *partial_rows += num_chunks * tile.q_len;
    }
}

/// Row `r` of chunk `c` lies at partial row `partial + c · q_len + r`.
fn combine(tile: &Tile, place: &Place, work: &mut WorkList, partial: u32, num_chunks: u32) {
    for row in 0..tile.q_len {
        work.combines.push(CombineItem {
            q_token: (place.first_token as u32) + tile.q_start + row,
            first: work.partials.len() as u32,
            count: num_chunks,
            reserved: 0,
        });
        let rows = (0..num_chunks).map(|c| partial + c * tile.q_len + row);
        work.partials.extend(rows);
    }
}

#[cfg(test)]
mod tests;
