//! Where the tokens of gathered requests are: a row's request, and the page and the place in the page of its token.

use crate::problem::{GatheredRequests, RecordPages};
use crate::tensor::{Integers, Tensor};
use std::ops::Range;

/// Lengths and page ids, which are on the host and were checked.
pub struct Requests<'a> {
    /// `cu_seq_lens`.
    ends: Integers<'a>,
    starts: Option<Integers<'a>>,
    pages: &'a RecordPages,
    page_size: i64,
}

impl<'a> Requests<'a> {
    /// `None` where the lengths are no integers of the host.
    pub fn new(requests: &'a GatheredRequests, page_size: i64) -> Option<Requests<'a>> {
        let starts = match &requests.seq_starts {
            None => None,
            Some(starts) => Some(starts.as_integers()?),
        };
        Some(Requests {
            ends: requests.cu_seq_lens.as_integers()?,
            starts,
            pages: &requests.pages,
            page_size,
        })
    }

    /// Those of all requests.
    pub fn rows(&self) -> Range<usize> {
        self.ends.get(0) as usize..self.ends.get(self.ends.len() - 1) as usize
    }

    /// Calls `row(row, [page, place in the page])` for some of the rows.
    pub fn for_each(&self, rows: Range<usize>, mut row: impl FnMut(usize, [i64; 2])) {
        let mut left = rows;
        // The request of the first row; the others follow.
        let mut b = self.ends.partition_point(|end| end as usize <= left.start) - 1;
        while !left.is_empty() {
            let end = left.end.min(self.ends.get(b + 1) as usize);
            let tokens = Tokens::of(self, b);
            for at in left.start..end {
                row(at, tokens.place(at, self.page_size));
            }
            left.start = left.start.max(end);
            b += 1;
        }
    }
}

/// The tokens of a request.
struct Tokens {
    /// The one in row 0, if the request had that row.
    of_row_0: i64,
    page_ids: Tensor,
    /// The id of its first page.
    first: i64,
}

impl Tokens {
    fn of(requests: &Requests<'_>, b: usize) -> Tokens {
        let start = requests.starts.map_or(0, |starts| starts.get(b));
        let (page_ids, first) = match requests.pages {
            RecordPages::Table(table) => (table.narrow(0, b as i64, 1).remove_dim(0), 0),
            RecordPages::Csr { indptr, indices } => (*indices, indptr.integer(&[b as i64])),
        };
        Tokens {
            of_row_0: start - requests.ends.get(b),
            page_ids,
            first,
        }
    }

    fn place(&self, row: usize, page_size: i64) -> [i64; 2] {
        let token = self.of_row_0 + row as i64;
        let page = self.page_ids.integer(&[self.first + token / page_size]);
        [page, token % page_size]
    }
}
