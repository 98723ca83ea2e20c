//! Which neighbouring requests of a batch share their first pages: what a cascade is made from, found in page tables as
//! engines with a prefix cache have them.

use super::reserve::reserve;
use crate::error::Result;
use crate::problem::{HostBatch, SharedPrefix};

/// Lists every set of two or more neighbouring requests that have first pages in common which no larger set has, each
/// behind those around it: fewer than there are requests. Whole pages count, and `found` begins empty. Page ids are on
/// the host.
///
/// Pages that neighbours have in common are as intervals of a Cartesian tree: a stack holds those that are open.
///
/// # Errors
/// `OutOfMemory` where the list cannot grow.
pub fn shared_prefixes(
    batch: &HostBatch<'_>,
    page_size: u32,
    found: &mut Vec<SharedPrefix>,
) -> Result<()> {
    found.clear();
    reserve("shared prefixes", found, batch.batch_size())?;
    let mut open: Vec<(u32, u32)> = Vec::new();
    reserve("shared prefixes", &mut open, batch.batch_size())?;
    for b in 0..batch.batch_size() {
        // With the next request; behind the last one there is none.
        let common = match b + 1 < batch.batch_size() {
            true => common_pages(batch, page_size, b),
            false => 0,
        };
        let mut start = b as u32;
        while let Some(&(first, pages)) = open.last().filter(|top| top.1 > common) {
            open.pop();
            found.push(SharedPrefix {
                requests: first..b as u32 + 1,
                kv_len: pages * page_size,
            });
            start = first;
        }
        if common > open.last().map_or(0, |top| top.1) {
            open.push((start, common));
        }
    }
    found.sort_by_key(|prefix| (prefix.requests.start, u32::MAX - prefix.requests.end));
    Ok(())
}

/// Whole pages that a request and the next one begin with.
fn common_pages(batch: &HostBatch<'_>, page_size: u32, b: usize) -> u32 {
    let whole = |b: usize| {
        let pages = batch.kv_len[b] as u32 / page_size;
        &batch.page_ids(b, page_size).unwrap_or_default()[..pages as usize]
    };
    let pairs = whole(b).iter().zip(whole(b + 1));
    pairs.take_while(|(one, other)| one == other).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Keys, PageIds, Pages, Requests};
    use proptest::prelude::*;

    const PAGE: u32 = 4;

    fn found(tables: &[Vec<i32>], kv_len: &[i32]) -> Vec<SharedPrefix> {
        let indptr: Vec<i32> = std::iter::once(0)
            .chain(tables.iter().scan(0, |sum, ids| {
                *sum += ids.len() as i32;
                Some(*sum)
            }))
            .collect();
        let ids = tables.concat();
        let batch = HostBatch {
            qo_indptr: &(0..=tables.len() as i32).collect::<Vec<_>>(),
            kv_len,
            keys: Keys::All,
            window_left: None,
            pages: Pages::Csr {
                indptr: &indptr,
                ids: PageIds::Host(&ids),
            },
            num_pages: ids.len(),
            max_page_id: 100,
            planned: Requests::All,
        };
        let mut found = Vec::new();
        shared_prefixes(&batch, PAGE, &mut found).unwrap();
        found
    }

    #[test]
    fn a_tree_of_prefixes() {
        let tables = [
            vec![9, 8, 1],
            vec![9, 8, 2],
            vec![9, 7, 6, 3],
            vec![9, 7, 6, 4],
            vec![5, 4],
        ];
        let expected = [(0..4, 4), (0..2, 8), (2..4, 12)]
            .map(|(requests, kv_len)| SharedPrefix { requests, kv_len });
        assert_eq!(found(&tables, &[12, 12, 16, 16, 8]), expected);
        // The last page of a request is not whole.
        assert_eq!(found(&tables[..2], &[8, 7])[0].kv_len, 4);
        assert_eq!(found(&tables[4..], &[8]), []);
        assert_eq!(found(&[], &[]), []);
    }

    proptest! {
        /// As by asking every interval.
        #[test]
        fn all_sets_are_found(
            tables in prop::collection::vec(prop::collection::vec(0i32..2, 0..6), 0..9),
        ) {
            let kv_len: Vec<i32> = tables.iter().map(|ids| PAGE as i32 * ids.len() as i32).collect();
            let common = |from: usize, end: usize| {
                let longest = tables[from].len();
                (0..=longest)
                    .rev()
                    .find(|&n| tables[from..end].iter().all(|ids| ids.get(..n) == Some(&tables[from][..n])))
                    .unwrap_or(0)
            };
            let mut expected = Vec::new();
            for from in 0..tables.len() {
                for end in (from + 2..=tables.len()).rev() {
                    let pages = common(from, end);
                    let is_widest = (from == 0 || common(from - 1, end) < pages)
                        && (end == tables.len() || common(from, end + 1) < pages);
                    if pages > 0 && is_widest {
                        expected.push(SharedPrefix {
                            requests: from as u32..end as u32,
                            kv_len: pages as u32 * PAGE,
                        });
                    }
                }
            }
            prop_assert_eq!(found(&tables, &kv_len), expected);
        }
    }
}
