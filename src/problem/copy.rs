//! What copying pages of a cache is given.

use crate::tensor::{Integers, Tensor};

/// Pages to be copied bit by bit (`copy_blocks` and `swap_blocks` in vLLM).
#[derive(Debug, Clone, Copy)]
pub struct CopyArgs {
    /// Keys, or a cache that has one tensor.
    pub k: PagesToCopy,
    /// Values, by the same pairs.
    pub v: Option<PagesToCopy>,
    /// `[n, 2]` int32 or int64: a page of src, and the page of dst that becomes its copy. A pair with a negative number
    /// is skipped. It may be on the host, whatever the context's device.
    pub page_pairs: Tensor,
}

/// Where pages come from, and where they go. Either may be in page-locked host memory, whatever the context's device.
#[derive(Debug, Clone, Copy)]
pub struct PagesToCopy {
    /// `[num_src_pages, ...]` of any type, without gaps within a page. Checked: bytes, `[num_src_pages, page bytes]`.
    pub src: Tensor,
    /// `[num_dst_pages, ...]`, of which a page is as one of `src`; may be `src` itself. Checked: as `src`.
    pub dst: Tensor,
}

/// Page pairs on the host.
#[derive(Debug, Clone, Copy)]
pub struct PagePairs<'a>(Integers<'a>);

impl CopyArgs {
    /// The pairs where they are on the host.
    pub fn pairs_on_host(&self) -> Option<PagePairs<'_>> {
        self.page_pairs.as_integers().map(PagePairs)
    }
}

impl PagesToCopy {
    /// Whether pages are copied within one tensor.
    pub fn is_in_place(&self) -> bool {
        self.src.address() == self.dst.address() && !self.src.is_empty()
    }
}

impl PagePairs<'_> {
    /// The number of pairs.
    pub fn len(&self) -> usize {
        self.0.len() / 2
    }

    /// No pairs.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A page of src and one of dst; `None` where the pair is skipped.
    pub fn get(&self, pair: usize) -> Option<[i64; 2]> {
        let pages = [2 * pair, 2 * pair + 1].map(|at| self.0.get(at));
        pages.iter().all(|&page| page >= 0).then_some(pages)
    }
}
