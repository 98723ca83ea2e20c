//! The bytes of a plan as workers read them: where each part lies in the workspace, and how a cut batch is written
//! there. One image serves every backend: the CPU's workers read it where it is written, a device gets a copy.
#![allow(unsafe_code)]

use super::capacity::{Capacity, Counts};
use crate::error::{Error, Result};
use crate::problem::{CombineItem, HostBatch, WorkItem, WorkList};

/// Alignment of the parts.
pub const PARTS_ALIGNMENT: usize = 256;

/// Numbers before the list of shares.
const COUNTS: usize = 6;

/// Hands out consecutive parts, each aligned.
#[derive(Debug, Clone, Copy, Default)]
struct Cursor(usize);

impl Cursor {
    /// Saturated sizes stay: no caller can bring so much memory, and `plan` says so.
    fn take(&mut self, count: usize, size: usize) -> usize {
        let start = self.0;
        self.0 = start
            .saturating_add(count.saturating_mul(size))
            .checked_next_multiple_of(PARTS_ALIGNMENT)
            .unwrap_or(usize::MAX);
        start
    }
}

/// Offsets, in bytes from the start of the workspace, of what `plan` writes. The same layout serves a staging
/// buffer on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Layout {
    /// `[6]` u32, at `FolioPlanCount` of `kernels/params/params.h`: work items, combine items, batch size, the last items, which
    /// are small, shares, and workers that take an item together. Then the list of shares, which has one entry more.
    pub counts: usize,
    /// `[1]` u32: 0 between runs; kernels draw tiles by it.
    pub next_tile: usize,
    /// `[batch_size + 1]` i32.
    pub qo_indptr: usize,
    /// `[batch_size]` i32.
    pub kv_len: usize,
    /// `[batch_size]` i64: first byte of a custom mask of bytes.
    pub mask_bytes_start: usize,
    /// `[batch_size]` i64: first byte of a custom mask of bits.
    pub mask_bits_start: usize,
    /// Work items.
    pub items: usize,
    /// Combine items.
    pub combines: usize,
    /// u32: the rows that combine items name.
    pub partials: usize,
    /// i32.
    pub page_ids: usize,
    /// One past the last part.
    pub end: usize,
}

impl Layout {
    /// Places the parts for so many records.
    pub fn new(counts: &Counts) -> Layout {
        let mut cursor = Cursor::default();
        let mut part = |count, size| cursor.take(count, size);
        Layout {
            counts: part(COUNTS.saturating_add(counts.shares), 4),
            next_tile: part(1, 4),
            qo_indptr: part(counts.batch_size.saturating_add(1), 4),
            kv_len: part(counts.batch_size, 4),
            mask_bytes_start: part(counts.batch_size, 8),
            mask_bits_start: part(counts.batch_size, 8),
            items: part(counts.items, size_of::<WorkItem>()),
            combines: part(counts.combines, size_of::<CombineItem>()),
            partials: part(counts.partials, 4),
            page_ids: part(counts.page_ids, 4),
            end: cursor.0,
        }
    }

    /// Whether the parts have room for so many records.
    fn check(&self, counts: &Counts) -> Result<()> {
        for (name, count, size, start, end) in [
            (
                "shares",
                counts.shares,
                4,
                self.counts + 4 * COUNTS,
                self.next_tile,
            ),
            (
                "requests",
                counts.batch_size,
                4,
                self.kv_len,
                self.mask_bytes_start,
            ),
            (
                "work items",
                counts.items,
                size_of::<WorkItem>(),
                self.items,
                self.combines,
            ),
            (
                "combine items",
                counts.combines,
                size_of::<CombineItem>(),
                self.combines,
                self.partials,
            ),
            (
                "partial rows",
                counts.partials,
                4,
                self.partials,
                self.page_ids,
            ),
            ("page ids", counts.page_ids, 4, self.page_ids, self.end),
        ] {
            let room = (end - start) / size;
            if count > room {
                return Err(Error::Internal(format!(
                    "plan: {count} {name} exceed the {room} that the workspace was sized for"
                )));
            }
        }
        Ok(())
    }
}

/// Offsets of everything that a backend keeps in the workspace, for the largest plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Regions {
    /// What `plan` writes.
    pub plan: Layout,
    /// `[partial_rows, num_qo_heads]` f32.
    pub partial_lse: usize,
    /// `[partial_rows, num_qo_heads, columns]` f32.
    pub partial_o: usize,
    /// What the backend has for itself: as many bytes as it asked for.
    pub own: usize,
    /// The size of it all.
    pub end: usize,
}

impl Regions {
    /// Places everything. A partial row has `columns` elements for each of the `heads`.
    pub fn new(capacity: &Capacity, heads: usize, columns: usize, own_bytes: usize) -> Regions {
        let plan = Layout::new(&capacity.counts);
        let mut cursor = Cursor(plan.end);
        let rows = capacity.partial_rows.saturating_mul(heads);
        let partial_lse = cursor.take(rows, 4);
        let partial_o = cursor.take(rows, columns.saturating_mul(4));
        let own = cursor.take(own_bytes, 1);
        Regions {
            plan,
            partial_lse,
            partial_o,
            own,
            end: cursor.0,
        }
    }
}

/// Fills `image`, which holds the layout up to the last page id, with a batch and its work; the items are those of
/// `work`, in an order of the caller's choice. Padding keeps what it held.
///
/// # Errors
/// `Internal` where the plan has more records than the workspace has room for.
pub fn write<'a>(
    image: &mut [u8],
    layout: &Layout,
    batch: &HostBatch<'_>,
    work: &WorkList,
    items: impl Iterator<Item = &'a WorkItem>,
    page_size: u32,
) -> Result<()> {
    layout.check(&Counts::of(batch, work))?;
    let n = batch.batch_size();
    let mut image = Image {
        bytes: image,
        layout,
    };
    let shares = work.shares.len().saturating_sub(1);
    let counts: [u32; COUNTS] = [
        work.items.len() as u32,
        work.combines.len() as u32,
        n as u32,
        work.small,
        shares as u32,
        work.workers_of_item,
    ];
    image.put(layout.counts, &counts);
    image.put(layout.counts + size_of_val(&counts), &work.shares);
    image.put(layout.next_tile, &[0u32]);
    image.put(layout.qo_indptr, batch.qo_indptr);
    image.put_lengths(batch);
    image.put(layout.mask_bytes_start, &work.starts.mask_bytes[..n]);
    image.put(layout.mask_bits_start, &work.starts.mask_bits[..n]);
    image.put_items(items);
    image.put(layout.combines, &work.combines);
    image.put(layout.partials, &work.partials);
    image.put_page_ids(batch, page_size);
    Ok(())
}

struct Image<'a> {
    bytes: &'a mut [u8],
    layout: &'a Layout,
}

impl Image<'_> {
    fn put<T: Plain>(&mut self, at: usize, values: &[T]) {
        let bytes = bytes_of(values);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Requests that are not planned have no keys.
    fn put_lengths(&mut self, batch: &HostBatch<'_>) {
        let at = self.layout.kv_len;
        self.put(at, batch.kv_len);
        for b in 0..batch.batch_size() {
            if !batch.planned.include(batch.qo_len(b)) {
                self.put(at + b * size_of::<i32>(), &[0i32]);
            }
        }
    }

    fn put_items<'a>(&mut self, items: impl Iterator<Item = &'a WorkItem>) {
        let part = &mut self.bytes[self.layout.items..self.layout.combines];
        let (room, _) = part.as_chunks_mut::<{ size_of::<WorkItem>() }>();
        for (room, item) in room.iter_mut().zip(items) {
            room.copy_from_slice(bytes_of(std::slice::from_ref(item)));
        }
    }

    /// Host page ids without gaps, in the order of the requests, as their starts say.
    fn put_page_ids(&mut self, batch: &HostBatch<'_>, page_size: u32) {
        let mut at = self.layout.page_ids;
        if let Some(ids) = batch.dense_page_ids() {
            return self.put(at, ids);
        }
        for b in 0..batch.batch_size() {
            let ids = batch.page_ids(b, page_size).unwrap_or_default();
            self.put(at, ids);
            at += size_of_val(ids);
        }
    }
}

/// Types without padding, whose bytes may be copied.
trait Plain: Copy {}
impl Plain for u32 {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for WorkItem {}
impl Plain for CombineItem {}

const _: () = assert!(size_of::<WorkItem>() == 48 && size_of::<CombineItem>() == 16);

fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `T` has no padding, so every byte of the slice is initialised.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Keys, PageIds, Pages, RequestStarts, Requests};

    fn i32s(image: &[u8], at: usize, count: usize) -> Vec<i32> {
        let words = image[at..at + 4 * count].as_chunks::<4>().0;
        words.iter().map(|word| i32::from_ne_bytes(*word)).collect()
    }

    #[test]
    fn a_batch_is_written_part_by_part() {
        let ids = [7, 8, -5, -5, 3, -5, -5, -5];
        let batch = HostBatch {
            qo_indptr: &[0, 1, 1, 4],
            kv_len: &[17, 0, 16],
            keys: Keys::All,
            window_left: None,
            pages: Pages::Table {
                ids: PageIds::Host(&ids),
                row_stride: 2,
            },
            num_pages: 3,
            max_page_id: 8,
            planned: Requests::All,
        };
        let item = WorkItem {
            request: 2,
            q_start: 1,
            q_len: 2,
            kv_end: 16,
            page_start: 2,
            q_token: 2,
            position: 14,
            ..WorkItem::default()
        };
        let combine = CombineItem {
            q_token: 3,
            first: 0,
            count: 2,
            reserved: 0,
        };
        let work = WorkList {
            items: vec![item],
            small: 1,
            workers_of_item: 3,
            combines: vec![combine],
            partials: vec![5, 9],
            starts: RequestStarts {
                page: vec![0, 2, 2],
                mask_bytes: vec![0, 17, 17, 65],
                mask_bits: vec![0, 3, 3, 9],
            },
            shares: vec![1, 1],
            ..WorkList::default()
        };
        let counts = Counts {
            batch_size: 3,
            items: 1,
            combines: 1,
            partials: 2,
            page_ids: 3,
            shares: 2,
        };
        let layout = Layout::new(&counts);
        let mut image = vec![0xaa; layout.end];
        write(&mut image, &layout, &batch, &work, work.items.iter(), 16).unwrap();
        assert_eq!(i32s(&image, layout.counts, 8), [1, 1, 3, 1, 1, 3, 1, 1]);
        assert_eq!(i32s(&image, layout.next_tile, 1), [0]);
        assert_eq!(i32s(&image, layout.qo_indptr, 4), [0, 1, 1, 4]);
        assert_eq!(i32s(&image, layout.kv_len, 3), [17, 0, 16]);
        assert_eq!(
            i32s(&image, layout.mask_bytes_start, 6),
            [0, 0, 17, 0, 17, 0]
        );
        assert_eq!(i32s(&image, layout.mask_bits_start, 6), [0, 0, 3, 0, 3, 0]);
        assert_eq!(
            i32s(&image, layout.items, 12),
            [2, 1, 2, 0, 16, 0, 0, 0, 2, 0, 2, 14]
        );
        assert_eq!(i32s(&image, layout.combines, 4), [3, 0, 2, 0]);
        assert_eq!(i32s(&image, layout.partials, 2), [5, 9]);
        assert_eq!(i32s(&image, layout.page_ids, 3), [7, 8, 3]);
    }

    #[test]
    fn more_records_than_room_are_refused() {
        let batch = HostBatch {
            qo_indptr: &[0, 1],
            kv_len: &[1],
            keys: Keys::All,
            window_left: None,
            pages: Pages::Ragged { indptr: &[0, 1] },
            num_pages: 0,
            max_page_id: -1,
            planned: Requests::All,
        };
        let layout = Layout::new(&Counts {
            batch_size: 1,
            items: 5,
            ..Counts::default()
        });
        let work = WorkList {
            items: vec![WorkItem::default(); 6],
            starts: RequestStarts {
                page: vec![0],
                mask_bytes: vec![0, 1],
                mask_bits: vec![0, 1],
            },
            ..WorkList::default()
        };
        let mut image = vec![0; layout.end];
        let refused = write(&mut image, &layout, &batch, &work, work.items.iter(), 1);
        let message = refused.unwrap_err().to_string();
        assert!(message.contains("6 work items exceed the 5"), "{message}");
    }
}
