//! Which pages requests own, and the two forms of page table that say so: CSR and block table.

use super::memory::Image;
use super::problem::{Problem, Storage};
use super::values::shuffled;
use folio::dtype::DType;

/// The pages of a batch.
#[derive(Debug, Clone)]
pub struct PageTable {
    /// Ids per request, as many as its keys need.
    pub ids: Vec<Vec<i32>>,
    /// Pages of the cache.
    pub num_pages: usize,
}

impl PageTable {
    /// Draws the pages; a ragged problem has none.
    pub fn of(problem: &Problem) -> PageTable {
        let Storage::Paged { unused_pages, .. } = problem.storage else {
            return PageTable {
                ids: Vec::new(),
                num_pages: 0,
            };
        };
        let count = |b: usize| problem.cached_len(b).div_ceil(problem.page_size()) as usize;
        let shared = |b: usize| shared_pages(problem, b);
        let num_requests = problem.requests.len();
        let own: usize = (0..num_requests).map(|b| count(b) - shared(b)).sum();
        let num_pages = own + unused_pages as usize;
        let mut free = shuffled(problem.seed, num_pages).into_iter();
        let mut ids: Vec<Vec<i32>> = Vec::new();
        for b in 0..num_requests {
            let mut pages = match shared(b) {
                0 => Vec::new(),
                n => ids[0][..n].to_vec(),
            };
            pages.extend(free.by_ref().take(count(b) - shared(b)));
            ids.push(pages);
        }
        PageTable { ids, num_pages }
    }
}

/// Leading pages of request `b` that belong to the first request: full in both.
pub fn shared_pages(problem: &Problem, b: usize) -> usize {
    match problem.storage {
        Storage::Paged {
            page_size,
            shared_pages,
            ..
        } if b > 0 => {
            let full = |r: usize| problem.cached_len(r) / page_size;
            shared_pages.min(full(0)).min(full(b)) as usize
        }
        _ => 0,
    }
}

/// An id that nobody may read: of columns that no request owns.
const UNOWNED: i32 = 0x7fff_0000;

/// CSR offsets and ids, where `csr`; else a block table, padded on the right.
pub fn page_table(csr: bool, dtype: DType, owned: &[Vec<i32>]) -> (Option<Vec<i32>>, Image) {
    if csr {
        let flat = owned.concat();
        let indptr = prefix_sums(owned.iter().map(|ids| ids.len() as i32));
        return (
            Some(indptr),
            Image::of_integers(dtype, &[flat.len() as i64], &flat),
        );
    }
    let columns = owned.iter().map(Vec::len).max().unwrap_or(0);
    let table: Vec<i32> = (owned.iter())
        .flat_map(|ids| (0..columns).map(|i| ids.get(i).copied().unwrap_or(UNOWNED)))
        .collect();
    (
        None,
        Image::of_integers(dtype, &[owned.len() as i64, columns as i64], &table),
    )
}

/// 0, and the sums of the first, the first two, … numbers.
pub fn prefix_sums(numbers: impl Iterator<Item = i32>) -> Vec<i32> {
    let mut sums = vec![0];
    for number in numbers {
        sums.push(sums[sums.len() - 1] + number);
    }
    sums
}
