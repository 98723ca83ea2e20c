//! The order in which workers take the items of a plan. What the items are is `schedule`'s and `cascade`'s. The order decides
//! only the time: every item writes its own memory. All orders are stable.

use super::reserve::reserve;
use crate::error::Result;
use crate::problem::{HostBatch, NO_PARTIAL, SmallItems, WorkItem, WorkList};

/// The costliest first.
pub(super) fn by_cost(work: &mut WorkList) -> Result<()> {
    largest_first(work, |item| item.cost)
}

/// The longest first, by the mean of the keys that a causal mask leaves to an item and of all that it has: which of the two
/// it takes is for the run to say.
pub(super) fn by_length(work: &mut WorkList) -> Result<()> {
    largest_first(work, |item| {
        let last = i64::from(item.position) + i64::from(item.q_len);
        let seen = last.min(i64::from(item.kv_end)) - i64::from(item.kv_start);
        (seen.max(0) as u32 + (item.kv_end - item.kv_start)) / 2
    })
}

/// Sizes are compared by their leading eight bits: a counting sort, since sorting 1024 keys exactly costs a
/// quarter of their plan.
fn largest_first(work: &mut WorkList, size: impl Fn(&WorkItem) -> u32) -> Result<()> {
    const CLASSES: usize = 256;
    let largest = work.items.iter().map(&size).max().unwrap_or(0);
    let shift = (u32::BITS - largest.leading_zeros()).saturating_sub(CLASSES.ilog2());
    let class = |item: &WorkItem| CLASSES - 1 - (size(item) >> shift) as usize;
    if work.items.is_sorted_by_key(class) {
        return Ok(());
    }
    let mut next = [0; CLASSES];
    for item in &work.items {
        next[class(item)] += 1;
    }
    let mut before = 0;
    for count in &mut next {
        before += std::mem::replace(count, before);
    }
    set_aside(work)?;
    for item in &work.unordered {
        let at = &mut next[class(item)];
        work.items[*at] = *item;
        *at += 1;
    }
    Ok(())
}

/// Puts the small items behind the others, each in the order that they have, and counts them.
pub(super) fn small_last(work: &mut WorkList, small: SmallItems) -> Result<()> {
    if small.rows == 0 {
        return Ok(());
    }
    set_aside(work)?;
    work.items.clear();
    let is_small = |item: &&WorkItem| small.include(item.q_len, item.kv_end - item.kv_start);
    let large = work.unordered.iter().filter(|item| !is_small(item));
    work.items.extend(large);
    let before = work.items.len();
    work.items.extend(work.unordered.iter().filter(is_small));
    work.small = (work.items.len() - before) as u32;
    Ok(())
}

/// Puts the first items of all shares before the others, each in the order that they have. Workers then know their first
/// items by themselves. `shares` says where each begins among all items, and after that where its other items begin.
pub(super) fn by_share(work: &mut WorkList) -> Result<()> {
    set_aside(work)?;
    work.items.clear();
    let firsts = work.shares.iter().map(|&at| work.unordered[at as usize]);
    work.items.extend(firsts);
    let mut shares = work.shares.iter().map(|&at| at as usize).peekable();
    for (at, item) in work.unordered.iter().enumerate() {
        if shares.next_if_eq(&at).is_none() {
            work.items.push(*item);
        }
    }
    let count = work.shares.len() as u32;
    for (share, at) in (0..).zip(&mut work.shares) {
        *at += count - share;
    }
    work.shares.push(work.items.len() as u32);
    Ok(())
}

/// Copies the items, to be put into order.
fn set_aside(work: &mut WorkList) -> Result<()> {
    work.unordered.clear();
    reserve("work items", &mut work.unordered, work.items.len())?;
    work.unordered.extend_from_slice(&work.items);
    Ok(())
}

/// Many tiles of a prefill read the same keys, so those of a request stay together, and a device's cache
/// serves all but the first. What is sorted are 16-byte keys that end in the item's index, which also settles
/// ties by row and key. Split tiles stand behind the whole ones where they are there to fill the end.
pub(super) fn by_request(
    work: &mut WorkList,
    batch: &HostBatch<'_>,
    split_last: bool,
) -> Result<()> {
    work.order.clear();
    reserve("work items", &mut work.order, work.items.len())?;
    work.order
        .extend(work.items.iter().zip(0..).map(|(item, index)| {
            let longest_first = i32::MAX - batch.kv_len[item.request as usize];
            u128::from(split_last && item.partial != NO_PARTIAL) << 127
                | u128::from(longest_first as u32) << 96
                | u128::from(item.request) << 64
                | u128::from(!item.cost) << 32
                | index
        }));
    if work.order.is_sorted() {
        return Ok(());
    }
    work.order.sort_unstable();
    set_aside(work)?;
    work.items.clear();
    let ordered = work
        .order
        .iter()
        .map(|&key| work.unordered[key as u32 as usize]);
    work.items.extend(ordered);
    Ok(())
}
