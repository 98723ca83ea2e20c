//! The bytes of a plan as the device reads them: written into a staging buffer, then copied as one piece.
#![allow(unsafe_code)]

use super::regions::Layout;
use crate::cuda::params::ItemPlace;
use crate::problem::{HostBatch, MergeItem, PageIds, Pages, WorkItem, WorkList};

/// Page ids of the batch that are copied: those in use, where they are on the host.
pub fn num_page_ids(batch: &HostBatch<'_>) -> usize {
    match batch.pages {
        Pages::Csr { ids, .. } | Pages::Table { ids, .. } => match ids {
            PageIds::Host(_) => batch.num_pages,
            PageIds::Device(_) => 0,
        },
        Pages::Ragged { .. } => 0,
    }
}

/// Fills `image`, which holds the layout up to the last page id. Padding keeps what it held.
pub fn write(
    image: &mut [u8],
    layout: &Layout,
    batch: &HostBatch<'_>,
    work: &WorkList,
    page_size: u32,
) {
    let counts = [work.items.len(), work.merges.len(), batch.batch_size(), 0];
    put(image, layout.counts, &counts.map(|count| count as u32));
    put(image, layout.next_tile, &[0u32]);
    put(image, layout.qo_indptr, batch.qo_indptr);
    put(image, layout.kv_len, batch.kv_len);
    put(image, layout.items, &work.items);
    put(image, layout.merges, &work.merges);
    write_page_ids(image, layout, batch, page_size);
    write_mask_starts(image, layout, batch);
    for (i, item) in work.items.iter().enumerate() {
        let place = place(
            item,
            batch,
            get(image, layout.page_start, item.request as usize),
        );
        put(image, layout.places + i * size_of::<ItemPlace>(), &[place]);
    }
}

/// Host page ids without gaps, and where each request's are.
fn write_page_ids(image: &mut [u8], layout: &Layout, batch: &HostBatch<'_>, page_size: u32) {
    let dense = batch.dense_page_ids();
    if let Some(ids) = dense {
        put(image, layout.page_ids, ids);
    }
    let mut copied = 0;
    for b in 0..batch.batch_size() {
        let page_start = match batch.page_ids(b, page_size) {
            Some(ids) if dense.is_none() => {
                put(image, layout.page_ids + 4 * copied, ids);
                copied += ids.len();
                (copied - ids.len()) as i64
            }
            _ => stated_page_start(batch, b),
        };
        put(image, layout.page_start + 8 * b, &[page_start]);
    }
}

/// Where each request's masks start.
fn write_mask_starts(image: &mut [u8], layout: &Layout, batch: &HostBatch<'_>) {
    let (mut bytes, mut bits) = (0i64, 0i64);
    for b in 0..batch.batch_size() {
        put(image, layout.mask_bytes_start + 8 * b, &[bytes]);
        put(image, layout.mask_bits_start + 8 * b, &[bits]);
        let elements = i64::from(batch.qo_len(b)) * i64::from(batch.kv_len[b]);
        bytes += elements;
        bits += (elements + 7) / 8;
    }
}

/// The first page id of a request in the caller's order; for ragged tensors its first row.
fn stated_page_start(batch: &HostBatch<'_>, b: usize) -> i64 {
    match batch.pages {
        Pages::Csr { indptr, .. } | Pages::Ragged { indptr } => i64::from(indptr[b]),
        Pages::Table { row_stride, .. } => (b * row_stride) as i64,
    }
}

fn place(item: &WorkItem, batch: &HostBatch<'_>, page_start: i64) -> ItemPlace {
    let b = item.request as usize;
    let q_start = item.q_start as i32;
    ItemPlace {
        page_start,
        q_token: batch.qo_indptr[b] + q_start,
        position: batch.kv_len[b] - batch.qo_len(b) as i32 + q_start,
    }
}

/// The address of the caller's page ids, where they are on the device.
pub fn device_page_ids(batch: &HostBatch<'_>) -> Option<u64> {
    match batch.pages {
        Pages::Csr { ids, .. } | Pages::Table { ids, .. } => match ids {
            PageIds::Device(address) => Some(address as u64),
            PageIds::Host(_) => None,
        },
        Pages::Ragged { .. } => None,
    }
}

/// Types without padding, whose bytes may be copied.
trait Plain: Copy {}
impl Plain for u32 {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for WorkItem {}
impl Plain for MergeItem {}
impl Plain for ItemPlace {}

fn put<T: Plain>(image: &mut [u8], at: usize, values: &[T]) {
    let len = size_of_val(values);
    // SAFETY: `T` has no padding, so every byte of the slice is initialised.
    let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), len) };
    image[at..at + len].copy_from_slice(bytes);
}

fn get(image: &[u8], start: usize, index: usize) -> i64 {
    let at = start + 8 * index;
    i64::from_ne_bytes(std::array::from_fn(|i| image[at + i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::plan::regions::Counts;

    fn i32s(image: &[u8], at: usize, count: usize) -> Vec<i32> {
        image[at..at + 4 * count]
            .chunks_exact(4)
            .map(|bytes| i32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect()
    }

    #[test]
    fn block_tables_become_page_ids_without_gaps() {
        let ids = [7, 8, -5, -5, 3, -5, -5, -5];
        let batch = HostBatch {
            qo_indptr: &[0, 1, 1, 4],
            kv_len: &[17, 0, 16],
            pages: Pages::Csr {
                indptr: &[0, 2, 2, 5],
                ids: PageIds::Host(&ids[..5]),
            },
            num_pages: 3,
            max_page_id: 8,
        };
        let table = HostBatch {
            pages: Pages::Table {
                ids: PageIds::Host(&ids),
                row_stride: 2,
            },
            ..batch
        };
        assert_eq!(num_page_ids(&table), 3);
        let work = WorkList {
            items: vec![WorkItem {
                request: 2,
                q_start: 1,
                q_len: 2,
                kv_end: 16,
                ..WorkItem::default()
            }],
            ..WorkList::default()
        };
        let layout = Layout::new(&Counts {
            batch_size: 3,
            items: 1,
            merges: 0,
            page_ids: 3,
        });
        let mut image = vec![0xaa; layout.end];
        write(&mut image, &layout, &table, &work, 16);
        assert_eq!(i32s(&image, layout.page_ids, 3), [7, 8, 3]);
        assert_eq!(get(&image, layout.page_start, 2), 2);
        assert_eq!(get(&image, layout.mask_bytes_start, 2), 17);
        assert_eq!(get(&image, layout.mask_bits_start, 2), 3);
        assert_eq!(i32s(&image, layout.counts, 3), [1, 0, 3]);
        // q_token, position of the item's first row.
        assert_eq!(i32s(&image, layout.places + 8, 2), [2, 14]);
    }
}
