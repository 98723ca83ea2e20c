//! Where the tokens of gathered requests are: a row's request, and the page and the place in the page of its token.

use crate::problem::{GatheredRequests, RecordPages};
use std::ops::Range;

/// Lengths and page ids, which are on the host and were checked.
pub struct Requests<'a> {
    /// `cu_seq_lens`.
    ends: &'a [i32],
    starts: Option<&'a [i32]>,
    pages: PageIds<'a>,
    page_size: usize,
}

/// The page ids of all requests.
struct PageIds<'a> {
    ids: &'a [i32],
    first: FirstPage<'a>,
}

/// Where those of a request begin.
enum FirstPage<'a> {
    Stride(usize),
    Indptr(&'a [i32]),
}

impl<'a> Requests<'a> {
    /// `None` where the tensors are no integers of the host.
    pub fn new(requests: &'a GatheredRequests, page_size: i64) -> Option<Requests<'a>> {
        let starts = match &requests.seq_starts {
            None => None,
            Some(starts) => Some(starts.as_i32()?),
        };
        Some(Requests {
            ends: requests.cu_seq_lens.as_i32()?,
            starts,
            pages: match &requests.pages {
                RecordPages::Table(table) => PageIds {
                    ids: table.as_i32_rows()?,
                    first: FirstPage::Stride(table.stride(0) as usize),
                },
                RecordPages::Csr { indptr, indices } => PageIds {
                    ids: indices.as_i32()?,
                    first: FirstPage::Indptr(indptr.as_i32()?),
                },
            },
            page_size: page_size as usize,
        })
    }

    /// Those of all requests.
    pub fn rows(&self) -> Range<usize> {
        let last = self.ends.len() - 1;
        self.ends[0] as usize..self.ends[last] as usize
    }

    /// Calls `row(row, [page, place in the page])` for some of the rows.
    pub fn for_each(&self, rows: Range<usize>, mut row: impl FnMut(usize, [i64; 2])) {
        // The request of the first row; the others follow.
        let mut b = self.ends.partition_point(|&end| end as usize <= rows.start) - 1;
        for at in rows {
            while self.ends[b + 1] as usize <= at {
                b += 1;
            }
            row(at, self.place(b, at));
        }
    }

    fn place(&self, b: usize, row: usize) -> [i64; 2] {
        let start = self.starts.map_or(0, |starts| starts[b] as usize);
        let token = start + row - self.ends[b] as usize;
        let first = match self.pages.first {
            FirstPage::Stride(stride) => b * stride,
            FirstPage::Indptr(indptr) => indptr[b] as usize,
        };
        let page = self.pages.ids[first + token / self.page_size];
        [page.into(), (token % self.page_size) as i64]
    }
}
