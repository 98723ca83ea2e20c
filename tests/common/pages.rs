//! Which pages a problem's requests own: shuffled ids with gaps, and shared leading pages.

use super::problem::{Problem, Storage};
use super::values::shuffled;

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
        let count = |b: usize| problem.requests[b].kv_len.div_ceil(problem.page_size()) as usize;
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
            let full = |r: usize| problem.requests[r].kv_len / page_size;
            shared_pages.min(full(0)).min(full(b)) as usize
        }
        _ => 0,
    }
}
